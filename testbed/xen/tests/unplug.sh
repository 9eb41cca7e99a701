# A disk is taken from its guest while it is mounted there and written to, with consent and without; from a guest that is paused;
# and after each the guest is alive, nothing is left of the disk, and the guest can have it again.
. /drop/life.sh
ram_disks 2 16
guest a mounted "" /dev/ram0
wait_said a ready=yes 200

gone() { # NAME PID
    wait_dead "$2" 1
    no_disk "$id" "$1"
    # Of ram1 only: the guest has another disk.
    expect "the locks on images" "$(grep -c OFDLCK /proc/locks)" 1
}
id=$(xl domid a)

# With consent: today's driver lets go of a disk that is mounted.
attach a raw:/dev/ram1 xvdb
wait_said a busy=1 100
pid=$(server_of a xvdb)
$tapline xen detach a xvdb --timeout 20 >/tmp/detach 2>&1 || { cat /tmp/detach; fail "detach of a mounted disk"; }
cat /tmp/detach
grep -q 'backend Closed' /tmp/detach || fail "detach does not tell the states"
gone xvdb "$pid"
wait_said a failed=1 100

# Without: it is pulled.
attach a raw:/dev/ram1 xvdb
wait_said a busy=2 100
pid=$(server_of a xvdb)
$tapline xen detach a xvdb --force || fail "detach --force"
gone xvdb "$pid"
wait_said a failed=2 100
before=$(hash_of /dev/ram1)
sleep 2
expect "the disk some time after it was pulled" "$(hash_of /dev/ram1)" "$before"

# A guest that is paused answers nobody: it keeps its disk, and lets it go when it can.
attach a raw:/dev/ram1 xvdb
wait_said a busy=3 100
pid=$(server_of a xvdb)
xl pause a
refused 4 'after 2 s the backend is Closing, the guest Connected' $tapline xen detach a xvdb --timeout 2
grep -q -e '--force' /tmp/refused || fail "detach does not name the way out"
[ -d "/proc/$pid" ] || fail "the process of a disk that is still used has ended"
xl unpause a
$tapline xen detach a xvdb || fail "detach after the guest was unpaused"
gone xvdb "$pid"
wait_said a failed=3 100

# Unless it is taken away: its file system waits for answers then that nobody gives, and the guest lives, with its other disk.
attach a raw:/dev/ram1 xvdb
wait_said a busy=4 100
pid=$(server_of a xvdb)
xl pause a
$tapline xen detach a xvdb --force || fail "detach --force of a paused guest"
gone xvdb "$pid"
before=$(hash_of /dev/ram1)
xl unpause a
wait_said a "beat=$(($(said a beat) + 3))" 100
expect "the disk some time after it was pulled" "$(hash_of /dev/ram1)" "$before"
xl destroy a || fail "xl destroy"
wait_gone a 60
nothing_left
