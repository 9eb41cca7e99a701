# The load of the comparisons, the $cases on each disk in turn: `figure=BACKEND CASE REQUESTS-A-SECOND`.
one() { # backend device name pattern bytes depth count
    /tools/fio --name=$3 --filename=/dev/$2 --rw=$4 --bs=$5 --iodepth=$6 --number_ios=$7 --ioengine=libaio --direct=1 \
        --randseed=1 --norandommap=1 --thread --size=16m --io_size=1g --output-format=terse --terse-version=3 >/tmp/fio 2>&1 \
        || { cat /tmp/fio; fail "$3 on $2"; }
    # Fields of terse version 3: KiB and milliseconds, of reads and of writes.
    rate=$(awk -F';' -v kib=${5%k} 'NF > 80 { if ($6 > 0) printf "%.1f", $6 / kib / $9 * 1000; else printf "%.1f", $47 / kib / $50 * 1000 }' /tmp/fio)
    [ "$3" = warm ] || say "figure=$1 $3 $rate"
}
# load BACKEND DEVICE CASE REQUESTS
load() {
    case $3 in
    rr4k1) one $1 $2 $3 randread 4k 1 $4 ;;
    rr4k32) one $1 $2 $3 randread 4k 32 $4 ;;
    rr4k128) one $1 $2 $3 randread 4k 128 $4 ;;
    sr64k1) one $1 $2 $3 read 64k 1 $4 ;;
    sr64k8) one $1 $2 $3 read 64k 8 $4 ;;
    sr1m2) one $1 $2 $3 read 1024k 2 $4 ;;
    rw4k1) one $1 $2 $3 randwrite 4k 1 $4 ;;
    rw4k32) one $1 $2 $3 randwrite 4k 32 $4 ;;
    sw64k8) one $1 $2 $3 write 64k 8 $4 ;;
    esac
}
# How many requests of a case take about as long as $requests of 4 KiB one after the other.
many() {
    case $1 in
    *4k32 | rr4k128) echo $((requests * 4)) ;;
    sr64k1) echo $((requests / 2)) ;;
    sr1m2) echo $((requests / 8)) ;;
    *) echo $requests ;;
    esac
}
# Each once more for its caches, and for the counter: with a mark before each of three runs, and one at the end.
count() { # backend device
    for each in $cases; do
        load $1 $2 $each $(many $each)
        for times in 1 1 3; do
            /job/mark
            load $1 $2 $each $(($(many $each) * times))
        done
        /job/mark
    done
}
round() { # backend device
    one $1 $2 warm randread 4k 1 200
    for each in $cases; do load $1 $2 $each $(many $each); done
}
n=1
while [ $n -le "$rounds" ]; do
    letter=97
    for backend in $backends; do
        device=xvd$(printf "\\$(printf %o $letter)")
        disk=/dev/$device
        [ $n -gt 1 ] || wait_for_disk
        if [ -e /job/mark ]; then count "$backend" "$device"; else round "$backend" "$device"; fi
        letter=$((letter + 1))
    done
    say "round=$n"
    n=$((n + 1))
done
