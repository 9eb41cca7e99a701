# Four disks at once, each verified; says what each holds at the end.
disks="xvda xvdb xvdc xvdd"
for each in $disks; do
    disk=/dev/$each
    wait_for_disk
done
set --
for each in $disks; do set -- "$@" --name="$each" --filename="/dev/$each"; done
/tools/fio --rw=randwrite --bsrange=4k-256k --iodepth=16 --size=8m --ioengine=libaio --direct=1 --verify=crc32c \
    --verify_fatal=1 --thread --eta=never --output=/tmp/fio "$@" || { cat /tmp/fio; fail "four disks"; }
for each in $disks; do say "$each=$(content_of /dev/"$each")"; done
