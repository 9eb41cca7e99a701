# Works on each of $disks all the time; each grows twice meanwhile, and what is new is used.
grown() { # name bytes
    tries=0
    until read -r sectors </sys/block/"$1"/size && [ "$sectors" = $(($2 / 512)) ]; do
        tries=$((tries + 1))
        [ $tries -lt 1200 ] || fail "$1 has $sectors sectors, not $(($2 / 512))"
        usleep 50000
    done
    [ "$(blockdev --getsize64 /dev/"$1")" = "$2" ] || fail "/dev/$1 has another size"
}
loads=
for each in $disks; do
    disk=/dev/$each
    wait_for_disk
    load_rounds "$each" "$disk" --bs=16k --iodepth=8 --size=8m --thinktime=2000 &
    loads="$loads $!"
done
from=$((16 << 20))
n=1
for size in $sizes; do
    say "waiting=$n"
    for each in $disks; do
        grown "$each" "$size"
        dd if=/dev/"$each" bs=64k skip=$((from / 65536)) iflag=direct 2>/dev/null | tr -d '\000' | grep -q . && fail "what is new of $each is not zero"
        /tools/fio --name=new --filename=/dev/"$each" --rw=randwrite --bs=32k --iodepth=8 --offset=$from --size=$((size - from)) \
            --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --eta=never --output=/tmp/new || { cat /tmp/new; fail "what is new of $each"; }
        # The last sector, and none behind it.
        dd if=/dev/zero of=/dev/"$each" bs=512 seek=$((size / 512 - 1)) count=1 conv=notrunc oflag=direct 2>/dev/null || fail "the last sector"
        dd if=/dev/zero of=/dev/"$each" bs=512 seek=$((size / 512)) count=1 conv=notrunc oflag=direct 2>/dev/null && fail "a sector behind the end"
    done
    say "used=$n"
    from=$size
    n=$((n + 1))
done
: >/tmp/enough
# A round that finds something wrong ends the guest.
for load in $loads; do wait "$load"; done
for each in $disks; do say "$each=$(content_of /dev/"$each")"; done
