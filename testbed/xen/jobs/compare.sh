# The load of the comparisons, on each disk in turn: `figure=BACKEND CASE REQUESTS-A-SECOND`.
one() { # backend device name pattern bytes depth count
    /tools/fio --name=$3 --filename=/dev/$2 --rw=$4 --bs=$5 --iodepth=$6 --number_ios=$7 --ioengine=libaio --direct=1 \
        --randseed=1 --norandommap=1 --thread --size=16m --io_size=1g --output-format=terse --terse-version=3 >/tmp/fio 2>&1 \
        || { cat /tmp/fio; fail "$3 on $2"; }
    # Fields of terse version 3: KiB and milliseconds, of reads and of writes.
    rate=$(awk -F';' -v kib=${5%k} 'NF > 80 { if ($6 > 0) printf "%.1f", $6 / kib / $9 * 1000; else printf "%.1f", $47 / kib / $50 * 1000 }' /tmp/fio)
    [ "$3" = warm ] || say "figure=$1 $3 $rate"
}
round() { # backend device
    one $1 $2 warm randread 4k 1 200
    one $1 $2 rr4k1 randread 4k 1 $requests
    one $1 $2 rr4k32 randread 4k 32 $((requests * 4))
    one $1 $2 sr64k1 read 64k 1 $((requests / 2))
    one $1 $2 sr64k8 read 64k 8 $requests
    one $1 $2 sr1m2 read 1024k 2 $((requests / 8))
    one $1 $2 rw4k1 randwrite 4k 1 $requests
    one $1 $2 rw4k32 randwrite 4k 32 $((requests * 4))
    one $1 $2 sw64k8 write 64k 8 $requests
}
n=1
while [ $n -le "$rounds" ]; do
    letter=97
    for each in $backends; do
        device=xvd$(printf "\\$(printf %o $letter)")
        disk=/dev/$device
        [ $n -gt 1 ] || wait_for_disk
        round "$each" "$device"
        letter=$((letter + 1))
    done
    say "round=$n"
    n=$((n + 1))
done
