# A disk's process is told to end while its guest waits for answers: to what the process has not seen yet, and to what the storage
# holds up for longer than a guest is waited for. Each time the guest has all of them, without an error; the disk is closed, and it
# can have another.
. /drop/life.sh
ram_disks 2 8
slow_group
echo "$(cat /sys/block/ram0/dev) wiops=2" >/cgroup/slow/io.max || fail "io.max"

guest a asked ""
id=$(xl domid a)
ended() { # HOW: the disk's process, with requests of the guest that wait so.
    attach a raw:/dev/ram0 xvda
    pid=$(server_of a xvda)
    case $1 in
    unseen) kill -STOP "$pid" ;;
    # Two writes a second; eight are asked for.
    slow) echo "$pid" >/cgroup/slow/cgroup.procs || fail "cgroup.procs" ;;
    esac
    answer a "$1"
    wait_said a "asked=$1" 100
    kill -TERM "$pid"
    kill -CONT "$pid"
    wait_dead "$pid" 30
    wait_said a "ended=$1" 60
    expect "how the guest's requests ended" "$(said a ended)" "$1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 "
    expect "both ends" "$(xenstore-read "$(end_of a xvda)/state" "/local/domain/$id/device/vbd/51712/state" | tr '\n' ' ')" "6 6 "
    for number in 1 2 3 4 5 6 7 8; do
        dd if=/dev/ram0 bs=64k skip=$number count=1 2>/dev/null | grep -q ", $1\$" || fail "the write $number of $1 is not on the disk"
    done
    $tapline xen detach a xvda || fail "detach of a disk that has closed"
    wait_said a "gone=$1" 60
    no_disk "$id" xvda
}

ended unseen
expect "what was done before the process saw it" "$(said a asked)" "unseen 0"
ended slow
[ "$(said a asked)" != "slow 16" ] || fail "the storage was not slow"
xl destroy a || fail "xl destroy"
wait_gone a 60
nothing_left
