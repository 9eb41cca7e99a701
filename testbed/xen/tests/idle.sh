# Four disks that were used and are idle cost next to nothing: their processes are not woken once in 30 s, and have at most
# 2 MiB each.
#
# What counts is Pss: what a process has for itself, and its share of what others have as well; the program is shared by
# all. Pages of the guest that stay mapped are in it where Linux counts them, and are the guest's: they are taken off.
#
# Two disks have the default engine. Linux's own worker for their syncs stays in their processes, and looks around every five
# seconds (uring/src/uring.rs); it is none of ours, and is told apart. With Linux AIO there is none.
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
# wakes PID [WORKERS]: how often its threads have gone to sleep so far, or the kernel's workers among them.
wakes() {
    for task in /proc/"$1"/task/*; do
        read -r name <"$task/comm"
        case ${2:-ours}:$name in
        ours:iou-wrk-*) ;;
        ours:* | workers:iou-wrk-*) cat "$task/status" ;;
        esac
    done | awk '/^voluntary_ctxt_switches/ { all += $2 } END { print all + 0 }'
}
number=0
for device in 51712 51728 51744 51760; do
    read -r pid <"/run/tapline/xen-tapline-$domid-$device.pid" || fail "nobody serves $device"
    echo "$pid $(wakes "$pid") $(wakes "$pid" workers)"
done >/tmp/before
sleep 30
while read -r pid ours workers; do
    number=$((number + 1))
    [ "$ours" -gt 0 ] || fail "the process $pid has never slept"
    expect "wake-ups of disk $number in 30 s" $(($(wakes "$pid") - ours)) 0
    workers=$(($(wakes "$pid" workers) - workers))
    [ $number -le 2 ] || expect "wake-ups of workers that disk $number must not have" $workers 0
    cp /proc/"$pid"/smaps "/out/smaps-$number"
    awk '/^[0-9a-f]+-[0-9a-f]+ / { guests = /\/dev\/xen\/gntdev/ }
        /^Pss:/ { all += $2; if (guests) theirs += $2 } /^Anonymous:/ { own += $2 }
        END { print all - theirs, own, theirs + 0 }' "/out/smaps-$number" >/tmp/pss
    read -r pss own theirs </tmp/pss
    echo "disk $number: Pss $pss KiB, $own of it data; $theirs KiB of the guest's pages; $workers wake-ups of the kernel's worker"
    [ "$pss" -gt 0 ] && [ "$pss" -le 2048 ] || fail "an idle disk has $pss KiB"
done </tmp/before
expect "disks" $number 4
xl destroy a || fail "xl destroy"
wait_gone a 60
