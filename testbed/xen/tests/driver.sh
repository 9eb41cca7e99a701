# The nodes of a disk are taken away under its process, and its guest dies before, while and after they connect: the process ends
# by itself and leaves nothing.
. /drop/life.sh
ram_disks 2 12

# The guest dies, paused, while its disk is being attached: sooner and later.
for pause in 0 0.1 0.3 0.6; do
    guest_paused b
    id=$(xl domid b)
    $tapline xen attach "$id" raw:/dev/ram0 --vdev xvda --log /out/serve-b.log >/tmp/attach 2>&1 &
    attaching=$!
    sleep $pause
    xl destroy b || fail "xl destroy"
    # It was done in time, or the reason is told.
    wait $attaching || grep -q "^tapline: cannot\|: cannot" /tmp/attach || { cat /tmp/attach; fail "attach to a guest that dies does not say why"; }
    cat /tmp/attach
    soon "the end of the process" 30 no_process
    # A node that was made too late is nobody's: detach removes it.
    left_over "$id" xvda
    nothing_left
done

# It dies when its driver has just begun to connect.
guest b rounds "disks=xvda"
id=$(xl domid b)
xl pause b
$tapline xen attach b raw:/dev/ram0 --vdev xvda --log /out/serve-b.log || fail "attach"
xl unpause b
front=/local/domain/$id/device/vbd/51712/state
until [ "$(xenstore-read $front)" != 1 ]; do :; done
xl destroy b || fail "xl destroy"
wait_gone b 60
nothing_left

# The nodes go while the guest writes: our end of one disk, by which its process ends, and the guest's end of the other, by which its
# process lets go of the guest and waits for another front end. What is left detach knows how to remove.
guest a rounds "disks='xvda xvdb'"
attach a raw:/dev/ram0 xvda
attach a raw:/dev/ram1 xvdb
wait_said a round=1 200
id=$(xl domid a)
a=$(server_of a xvda)
b=$(server_of a xvdb)
xenstore-rm "$(end_of a xvda)" || fail "xenstore-rm"
wait_dead "$a" 20
expect "the locks on images" "$(grep -c OFDLCK /proc/locks)" 1
$tapline xen detach a xvda || fail "detach of a disk without a backend"
no_disk "$id" xvda
xenstore-rm "/local/domain/$id/device/vbd/51728" || fail "xenstore-rm"
soon "our end closed" 20 state_is "$(end_of a xvdb)" 6
expect "pages that are mapped without a front end" "$(grep -c xen/gntdev "/proc/$b/maps")" 0
$tapline xen list
$tapline xen detach a xvdb || fail "detach of a disk without a guest's end"
wait_dead "$b" 10
no_disk "$id" xvdb
expect "the locks on images" "$(grep -c OFDLCK /proc/locks)" 0
xl destroy a || fail "xl destroy"
wait_gone a 60
nothing_left
