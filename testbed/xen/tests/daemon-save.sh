# A guest of the daemon is saved by xl, and goes on: as a checkpoint at once, and from a file when its VM is started. Meanwhile the VM is
# halted, and nobody has its disk.
. /drop/life.sh
guest_memory=160
. /drop/daemon.sh
saved=/tmp/saved
start_vm
pid=$(server_of "$vm" xvda)

# The daemon does not take it for a guest that has ended.
xl save -c "$vm" $saved || fail "a checkpoint"
rm $saved
goes_on "$vm"
vm_is running || fail "the VM does not run after a checkpoint"
expect "who serves the disk" "$(server_of "$vm" xvda)" "$pid"

xl save "$vm" $saved || fail "save"
halted() { vm_is halted; }
soon "end of the VM" 60 halted
no_process || fail "a process is left"
! xenstore-ls -f /local/domain/0/backend | grep "/backend/$kind/[0-9]" || fail "nodes are left"
done_by "export" vdi export "$vdi" /images/out/before.raw --format raw
xl restore -p -e $saved || fail "restore"
rm $saved
domain=$(xl domid "$vm")
done_by "start" vm start guest
expect "the domain in which it goes on" "$(xl domid "$vm")" "$domain"
goes_on "$vm"
expect "how often it has booted" "$(grep -ac "TAPLINE init=" "$(console_of "$vm")")" 1

done_by "shutdown" vm shutdown guest --force-after 100
done_by "export" vdi export "$vdi" /images/out/first.raw --format raw
expect "what the disk holds" "$(hash_of /images/out/first.raw)" "$(said "$vm" xvda)"
done_by "destroy" vm destroy guest --yes
stop_daemon
nothing_left
