# Four disks that were used and are idle cost next to nothing: their processes are not woken once in 30 s, and have at most
# 2 MiB each.
#
# What counts is Pss: what a process has for itself, and its share of what others have as well. Pages of the guest that
# stay mapped are in it where Linux counts them, and are the guest's: they are taken off. So is the program, which all
# share: that of the development profile is several times as large as the released one.
#
# All threads count, those too that Linux adds to a process for io_uring (iou-wrk-*): the last of these would stay and look around
# every five seconds, and so there must be none (uring/src/uring.rs). Two disks have the default engine, two Linux AIO.
ram_disks 4 12
guest a idle "disks='a b c d'"
number=0
for engine in uring uring aio aio; do
    /drop/tapline xen attach a raw:/dev/ram$number --vdev "$(xvd $number)" --io-engine $engine --log /out/serve-$number.log --wait \
        || fail "attach $number"
    number=$((number + 1))
done
domid=$(xl domid a)
wait_said a idle=yes 300
sleep 5
# wakes PID: how often its threads have gone to sleep so far.
wakes() {
    cat /proc/"$1"/task/*/status | awk '/^voluntary_ctxt_switches/ { all += $2 } END { print all + 0 }'
}
number=0
for device in 51712 51728 51744 51760; do
    read -r pid <"/run/tapline/xen-tapline-$domid-$device.pid" || fail "nobody serves $device"
    echo "$pid $(wakes "$pid")"
done >/tmp/before
sleep 30
while read -r pid slept; do
    number=$((number + 1))
    [ "$slept" -gt 0 ] || fail "the process $pid has never slept"
    expect "wake-ups of disk $number in 30 s" $(($(wakes "$pid") - slept)) 0
    expect "threads of disk $number" "$(cat /proc/"$pid"/task/*/comm)" tapline-disk
    cp /proc/"$pid"/smaps "/out/smaps-$number"
    # The data of the program, which each process has for itself, stays in.
    awk '/^[0-9a-f]+-[0-9a-f]+ / {
            guests = /\/dev\/xen\/gntdev/
            shared = / r-xp .*\/tapline-disk$/ || / r--p 00000000 .*\/tapline-disk$/
        }
        /^Pss:/ { all += $2; if (guests) theirs += $2; if (shared) program += $2 } /^Anonymous:/ { own += $2 }
        END { print all - theirs - program, own, theirs + 0, program + 0 }' "/out/smaps-$number" >/tmp/pss
    read -r pss own theirs program </tmp/pss
    echo "disk $number: Pss $pss KiB, $own of it data; $theirs KiB of the guest's pages, $program of the program"
    [ "$pss" -gt 0 ] && [ "$pss" -le 2048 ] || fail "an idle disk has $pss KiB"
done </tmp/before
expect "disks" $number 4
xl destroy a || fail "xl destroy"
wait_gone a 60
