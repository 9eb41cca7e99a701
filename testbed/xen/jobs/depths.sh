# Each case writes at random what nobody wrote before, and reads it back.
wait_for_disk
for depth in 1 4 16 32 64 128; do
    for bytes in 512 4k 20k 64k 256k 1m; do
        case $bytes in
        512) amount=128k ;;
        4k) amount=2m ;;
        *) amount=4m ;;
        esac
        /tools/fio --name=depth --filename=$disk --rw=randwrite --bs=$bytes --iodepth=$depth --size=$amount --offset=4m \
            --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --randseed=$((depth + 1)) --eta=never --output=/tmp/fio \
            || { cat /tmp/fio; fail "depth $depth, $bytes"; }
    done
    say "depth=$depth"
done
