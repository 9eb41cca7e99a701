# The daemon runs a guest with the driver xen: started with its disk, another plugged and unplugged while it runs, a snapshot; disk
# processes killed, and the daemon itself; held and let go on; shut down. What the guest has read last is what its disks hold.
. /drop/life.sh
. /drop/daemon.sh
refused 4 "is not running" $tapline vbd plug "$vbd"
second=$($tapline vdi create second --sr local --size 4M) || fail "another VDI"
start_vm

# Nobody's process, which can do nothing but serve.
pid=$(server_of "$vm" xvda)
expect "whose the disk's process is" "$(awk '/^Uid:/ { print $2 }' "/proc/$pid/status")" 65534
expect "what it may" "$(awk '/^CapEff:/ { print $2 }' "/proc/$pid/status")" 0000000000000000
expect "its system calls are filtered" "$(awk '/^Seccomp:/ { print $2 }' "/proc/$pid/status")" 2

# What tools read of it counts what the guest asks for, though it can make no file.
statistics_of() { echo "/dev/shm/td3-$1/vbd-$(xl domid "$vm")-51712"; }
counted() {
    set -- $(od -An -v -tu8 -j8 "$(statistics_of "$1")")
    # Reads and writes that were answered.
    [ "$3" -gt 0 ] && [ "$7" -gt 0 ]
}
expect "the bytes of its statistics" "$(stat -c %s "$(statistics_of "$pid")")" 96
expect "the bytes of the older" "$(stat -c %s "/dev/shm/vbd3-$(xl domid "$vm")-51712/statistics")" 112
soon "requests counted" 60 counted "$pid"

# A second disk comes, and a state of the first is kept.
other=$($tapline vbd create --vm "$vm" --vdi "$second") || fail "another VBD"
done_by "plug" vbd plug "$other"
wait_said "$vm" plugged=1 120
done_by "snapshot" vdi snapshot "$vdi" --name kept
goes_on "$vm"

# Both kinds of process die; the guest sees nothing of it.
kill -9 "$pid"
soon "other process" 60 served_by_another
goes_on "$vm"
[ ! -e "/dev/shm/td3-$pid" ] || fail "the statistics of a killed process are left"
pid=$(server_of "$vm" xvda)
soon "requests counted by the next process" 60 counted "$pid"
kill -9 "$daemon"
wait_dead "$daemon" 10
goes_on "$vm"
start_daemon _=
vm_is running || fail "the VM is not found again"
expect "the disk's process, behind the daemon's death" "$(server_of "$vm" xvda)" "$pid"
# The new daemon follows it as the old one did.
kill -9 "$pid"
soon "another process of the new daemon" 60 served_by_another
goes_on "$vm"

done_by "unplug" vbd unplug "$other"
wait_said "$vm" gone=1 60
domain=$(xl domid "$vm")
no_disk "$domain" xvdb
done_by "export" vdi export "$second" /images/out/second.raw --format raw
expect "what the second disk holds" "$(hash_of /images/out/second.raw)" "$(said "$vm" content)"
done_by "plug again" vbd plug "$other"
wait_said "$vm" plugged=2 120

done_by "pause" vm pause guest
before=$(rounds "$vm")
sleep 3
expect "rounds while it is held" "$(rounds "$vm")" "$before"
done_by "resume" vm resume guest
goes_on "$vm"

# A clean end: the guest says what its disk holds, and powers off.
done_by "shutdown" vm shutdown guest --force-after 100
vm_is halted || fail "the VM is not halted"
grep -aq "TAPLINE end=ok" "$(console_of "$vm")" || fail "the guest was not asked"
xl domid "$vm" 2>/dev/null && fail "the domain is left"
no_process || fail "processes are left"
no_disk "$domain" xvda
done_by "export" vdi export "$vdi" /images/out/first.raw --format raw
expect "what the first disk holds" "$(hash_of /images/out/first.raw)" "$(said "$vm" xvda)"

done_by "destroy" vm destroy guest --yes
stop_daemon
nothing_left
