# What dom0 asks for and cannot have: each time a message that says why, an exit code, an end in bounded time, and nothing left.
. /drop/life.sh
ram_disks 3 12

# timely SECONDS COMMAND...: it ends in time.
timely() {
    begun=$(date +%s)
    most=$1
    shift
    "$@"
    ended=$?
    took=$(($(date +%s) - begun))
    [ $took -le "$most" ] || fail "'$*' took $took s"
    return $ended
}

# Who is not there.
refused 4 'cannot find the domain 4711: there is no domain.*' $tapline serve raw:/dev/ram0 --xen 4711/xvda
grep -q 'xenstore has 0 (Domain-0)' /tmp/refused || fail "the domains that there are are not named"
refused 4 'cannot find the domain nobody' $tapline xen attach nobody raw:/dev/ram0
refused 4 'it has no such disk\|cannot find the domain' $tapline xen detach 4711 xvda
nothing_left

# A guest that does not run.
guest_paused b
id=$(xl domid b)
refused 4 'after 2 s the backend is InitWait, the guest Initialising' timely 20 $tapline xen attach b raw:/dev/ram0 --vdev xvda --wait --timeout 2
grep -q 'connects later' /tmp/refused || fail "it is not said what becomes of the disk"
pid=$(server_of b xvda)

# A device that is served, and an image that is in use.
refused 4 "process $pid already does" $tapline serve raw:/dev/ram1 --xen "$id/xvda"
refused 4 'it already exists' $tapline xen attach b raw:/dev/ram1 --vdev xvda
refused 4 'in use' timely 20 $tapline xen attach b raw:/dev/ram0 --vdev xvdb
no_disk "$id" xvdb
refused 4 'No such file\|not exist\|no such' $tapline xen attach b raw:/images/none --vdev xvdb
no_disk "$id" xvdb
refused 4 'not a VHD\|no VHD\|VHD' $tapline xen attach b vhd:/dev/ram1 --vdev xvdb
no_disk "$id" xvdb

# One that was never connected is let go at once; one that is stuck is told of with its states, and there is a way out.
timely 20 $tapline xen detach b xvda || fail "detach of a disk that nobody uses"
wait_dead "$pid" 1
no_disk "$id" xvda
$tapline xen attach b raw:/dev/ram0 --vdev xvda || fail "attach"
pid=$(server_of b xvda)
xenstore-write "/local/domain/$id/device/vbd/51712/state" 4
soon "refusal of a front end without rings" 20 state_is "$(end_of b xvda)" 5
refused 4 'after 2 s the backend is Closing, the guest Connected' timely 20 $tapline xen detach b xvda --timeout 2
grep -q -e '--force' /tmp/refused || fail "the way out is not told"
timely 20 $tapline xen detach b xvda --force || fail "detach --force"
wait_dead "$pid" 1
no_disk "$id" xvda

# A process that hangs is killed, and that is told.
$tapline xen attach b raw:/dev/ram0 --vdev xvda || fail "attach"
pid=$(server_of b xvda)
kill -STOP "$pid"
timely 40 $tapline xen detach b xvda --force >/tmp/detach 2>&1 || { cat /tmp/detach; fail "detach --force of a process that hangs"; }
cat /tmp/detach
grep -q "$pid has not exited in 10 s" /tmp/detach || fail "it is not told that the process was killed"
wait_dead "$pid" 1
# Killed, it could not remove its files: detach has.
no_disk "$id" xvda

# So it is with one that others have killed, and with one that has followed such a one.
served_by_another() { now=$(xenstore-read "$(end_of b xvda)/tapline/pid") && [ "$now" != "$pid" ]; }
for followed in no yes; do
    $tapline xen attach b raw:/dev/ram0 --vdev xvda || fail "attach"
    pid=$(server_of b xvda)
    cat "/proc/$pid/cmdline" >/tmp/words
    kill -9 "$pid"
    wait_dead "$pid" 5
    ls /run/tapline /dev/shm >/tmp/left
    grep -q "vbd3-$id-51712" /tmp/left && grep -q "xen-$id-xvda.sock" /tmp/left || fail "a killed process has left nothing"
    if [ $followed = yes ]; then
        xargs -0 setsid </tmp/words >>/out/followed.log 2>&1 &
        soon "process that follows" 20 served_by_another
    fi
    timely 30 $tapline xen detach b xvda --force || fail "detach of a disk whose process was killed"
    no_disk "$id" xvda
done

# Without the kernel's devices.
for device in gntdev evtchn; do
    mv /dev/xen/$device /tmp/ || fail "mv $device"
    refused 4 "/dev/xen/$device" $tapline serve raw:/dev/ram0 --xen "$id/xvda"
    refused 4 "/dev/xen/$device" $tapline xen attach b raw:/dev/ram0 --vdev xvda
    mv /tmp/$device /dev/xen/
    no_disk "$id" xvda
done

# As a user who is not root.
# Not busybox's.
nobody="/usr/bin/setpriv --reuid 65534 --regid 65534 --clear-groups"
refused 4 'root' $nobody $tapline xen list
refused 4 'root' $nobody $tapline xen attach b raw:/dev/ram0 --vdev xvda
chmod 666 /run/xenstored/socket /dev/ram0
chmod 600 /dev/xen/gntdev
refused 4 '/dev/xen/gntdev' $nobody $tapline serve raw:/dev/ram0 --xen "$id/xvda"
no_disk "$id" xvda
xl destroy b
nothing_left

# The store does not answer: commands wait for a bounded time, and a guest's disk goes on.
guest a rounds "disks=xvda"
attach a raw:/dev/ram0 xvda
wait_said a round=1 200
pid=$(server_of a xvda)
a=$(xl domid a)
store=$(cat /run/xen/xenstored.pid)
kill -STOP "$store"
refused 4 'no answer\|in 5 s' timely 30 $tapline xen list
refused 4 'no answer\|in 5 s' timely 30 $tapline serve raw:/dev/ram1 --xen "$a/xvdb"
refused 4 'no answer\|in 5 s' timely 30 $tapline xen attach "$a" raw:/dev/ram1 --vdev xvdb
refused 4 'no answer\|in 5 s' timely 30 $tapline xen detach "$a" xvda
goes_on a
kill -CONT "$store"
# Nothing of what was asked for meanwhile is done half.
$tapline xen list
no_disk "$a" xvdb
goes_on a

# Nor is it there any more: the disk goes on, and its process ends when it is told to.
kill -9 "$store"
refused 4 'does not run' timely 10 $tapline xen list
goes_on a
[ -d "/proc/$pid" ] || fail "the disk has gone with the store"
kill "$pid"
wait_dead "$pid" 20
expect "the locks on images" "$(grep -c OFDLCK /proc/locks)" 0
