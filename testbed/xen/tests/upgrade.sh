# The process of a disk is replaced six times while its guest reads, writes and verifies: by itself, with a layer more than it was
# started with, by hand, by SIGTERM to one that is to leave, and twice in a row. The guest sees no error, and the image is sound.
tapline=/drop/tapline
images 96
$tapline image create qcow2:/images/a.qcow2 --size 16M || fail "create"
guest a upgrade ""
$tapline xen attach a qcow2:/images/a.qcow2 --vdev xvda --log /out/disk.log --wait || fail "attach"
domid=$(xl domid a)
node=/local/domain/0/backend/tapline/$domid/51712
socket=/run/tapline/xen-$domid-xvda.sock
server() { xenstore-read $node/tapline/pid; }
# replaced: the disk has another process than before, and the guest has got on.
replaced() {
    [ "$(server)" != "$before" ] || fail "the process is the same"
    [ ! -d /proc/"$before" ] || fail "the old process is there still"
    wait_said a round=$(($(said a round) + 2)) 200
}
upgrade() {
    before=$(server)
    $tapline xen upgrade a xvda || { cat /out/disk.log; fail "upgrade"; }
    replaced
}

wait_said a round=1 200
upgrade
$tapline disk $socket snapshot --to qcow2:/images/b.qcow2 || fail "snapshot"
upgrade
expect "the layers" "$($tapline disk $socket layers --json | grep -o '/images/[ab].qcow2' | tr '\n' ' ')" \
    "/images/b.qcow2 /images/a.qcow2 "

# By hand, as docs/xen.md has it.
before=$(server)
tr '\0' '\n' <"/proc/$before/cmdline" | sed 1d >/tmp/words
kill -USR2 "$before"
while [ -d /proc/"$before" ]; do sleep 0.1; done
xenstore-read $node/tapline/pid 2>/dev/null && fail "a process that has ended is named"
expect "both ends, with nobody between" "$(xenstore-read $node/state "/local/domain/$domid/device/vbd/51712/state" | tr '\n' ' ')" "4 4 "
(tr '\n' '\0' </tmp/words && printf '%s\0' --on-stop leave) | xargs -0 setsid /drop/tapline-disk >>/out/disk.log 2>&1 &
while [ "$(server 2>/dev/null)" = "" ]; do sleep 0.1; done
replaced
before=$(server)
kill -TERM "$before"
while [ -d /proc/"$before" ]; do sleep 0.1; done
tr '\n' '\0' </tmp/words | xargs -0 setsid /drop/tapline-disk >>/out/disk.log 2>&1 &
while [ "$(server 2>/dev/null)" = "" ]; do sleep 0.1; done
replaced
$tapline xen upgrade a xvda && $tapline xen upgrade a xvda || fail "twice in a row"
xl destroy a || fail "xl destroy"
wait_gone a 60
expect "how often it was taken over" "$(grep -c 'the front end is taken over' /out/disk.log)" 6
grep -q 'still uses the device' /out/disk.log && fail "the guest was told"
$tapline image check qcow2:/images/b.qcow2 --parent qcow2:/images/a.qcow2 || [ $? -eq 5 ] || fail "check"
