# The numbers that tools read in /dev/shm are those of the guest's requests, exactly, in both files of tapdisk3: those of old (struct
# blkback_stats of blktap, include/blktap3.h), and that which today's find through the store (struct stats of
# drivers/tapdisk-metrics-stats.h). So are our own.
. /drop/life.sh
. /drop/storage.sh
kind=vbd3
images 16
truncate -s 8M /images/disk.raw

# The fourteen numbers: requests to discard, to flush, without memory; of reads those that came, those that were answered,
# sectors, microseconds in all and at most; the same of writes; flags.
numbers() {
    file=/dev/shm/vbd3-$(xl domid a)-51712/statistics
    [ "$(stat -c %s "$file")" = 112 ] || fail "$file has not 112 bytes"
    set -- $(od -An -v -tu8 "$file")
    echo "$*"
}
counts() {
    set -- $(numbers)
    echo "discards $1 flushes $2 oom $3 reads $4 $5 sectors $6 writes $9 ${10} sectors ${11} flags ${14}"
}
# The file of today as libxenstat finds it: by the bus, the store, the number of the process, and the version.
numbers_of_today() {
    device=$(xl domid a)/51712
    [ -e "/sys/bus/xen-backend/devices/vbd3-${device%/*}-${device#*/}" ] || fail "the bus has no such disk"
    pid=$(xenstore-read "/local/domain/0/backend/vbd3/$device/kthread-pid") || fail "the store names no process"
    file=/dev/shm/td3-$pid/vbd-${device%/*}-${device#*/}
    [ "$(stat -c %s "$file")" = 96 ] || fail "$file has not 96 bytes"
    expect "the version in $file" "$(od -An -v -tu4 -N8 "$file" | tr -s ' ')" " 1 0"
    set -- $(od -An -v -tu8 -j8 "$file")
    echo "$*"
}
# same AT: today's numbers, of a disk that nobody uses meanwhile, are those of old.
same() {
    set -- "$1" $(numbers)
    expect "today's numbers $1" "$(numbers_of_today)" "0 $5 $6 $7 $8 ${10} ${11} ${12} ${13} 0 0"
}
# ours KEY: its bytes, count and those under way, as `tapline disk … stats` tells.
ours() {
    control a xvda stats --json | sed "s/.*\"$1\":{\([^}]*\)}.*/\1/" | tr , '\n' | sed -n 's/^"\(count\|bytes\|in_flight\)":/\1 /p' | sort | tr '\n' ' '
}
nothing_in_shm() {
    left=$(ls -d /dev/shm/vbd3-* /dev/shm/td3-* 2>/dev/null)
    [ -z "$left" ] || fail "left: $left"
}
# at POINT: waits until the guest is there.
at() { wait_said a "ask=$1" 100; }

guest a statistics ""
attach a raw:/images/disk.raw xvda --backend-kind vbd3
at before
same before
set -- $(numbers)
discards=$1 flushes=$2 reads=$4 answered=$5 read=$6 writes=$9 written_requests=${10} written=${11}
expect "reads without answer" "$answered" "$reads"
# should DISCARDS FLUSHES READS SECTORS WRITES SECTORS: more than before.
should() {
    echo "discards $((discards + $1)) flushes $((flushes + $2)) oom 0 reads $((reads + $3)) $((answered + $3)) sectors $((read + $4))" \
        "writes $((writes + $5)) $((written_requests + $5)) sectors $((written + $6)) flags 0"
}
answer a
at 100-reads-of-4k
expect "the numbers after 100 reads of 4 KiB" "$(counts)" "$(should 0 0 100 800 0 0)"
same "after 100 reads of 4 KiB"
answer a
at 40-writes-of-32k
expect "the numbers after 40 writes of 32 KiB" "$(counts)" "$(should 0 0 100 800 40 2560)"
same "after 40 writes of 32 KiB"
answer a
at 7-flushes
expect "the numbers after 7 flushes" "$(counts)" "$(should 0 7 100 800 40 2560)"
same "after 7 flushes"
answer a
at 3-discards
expect "the numbers after 3 discards" "$(counts)" "$(should 3 7 100 800 40 2560)"
same "after 3 discards"
set -- $(numbers)
# Times: of 100 reads none took nothing, and none took more than all.
[ "$7" -ge 100 ] && [ "$8" -gt 0 ] && [ "$8" -le "$7" ] && [ "$7" -lt 60000000 ] || fail "reads took $7 us, at most $8"
[ "${12}" -ge 40 ] && [ "${13}" -gt 0 ] && [ "${13}" -le "${12}" ] || fail "writes took ${12} us, at most ${13}"
last=$*
expect "our own count of reads" "$(ours reads)" "bytes $(($6 * 512)) count $4 in_flight 0 "
expect "our own count of writes" "$(ours writes)" "bytes $((${11} * 512)) count $9 in_flight 0 "
expect "our own count of flushes" "$(ours flushes)" "bytes 0 count $2 in_flight 0 "
answer a
at idle
expect "the numbers of a disk that does nothing" "$(numbers)" "$last"
same "of a disk that does nothing"

# The process is replaced, and readers are sent to the next one's.
before=$(server_of a xvda)
$tapline xen upgrade a xvda || fail "upgrade"
[ ! -e "/dev/shm/td3-$before" ] || fail "the process $before has left its statistics"
numbers_of_today >/dev/null
expect "the process that readers look for" "$pid" "$(server_of a xvda)"
answer a
wait_end a 60
nothing_in_shm

# One that is killed leaves them; who takes the disk away removes them.
guest a statistics ""
attach a raw:/images/disk.raw xvda --backend-kind vbd3
at before
pid=$(server_of a xvda)
kill -9 "$pid"
wait_dead "$pid" 5
[ -e "/dev/shm/td3-$pid" ] || fail "there is nothing to remove"
$tapline xen detach a xvda --force || fail "detach"
nothing_in_shm
xl destroy a || fail "xl destroy"
wait_gone a 60
