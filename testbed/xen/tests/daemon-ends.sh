# Ends of a guest that the daemon runs with the driver xen: it powers off by itself, somebody else destroys it, it is ended by force; and
# a daemon that dies when it has made the domain.
. /drop/life.sh
. /drop/daemon.sh

# The next daemon leaves nothing of a domain that nobody was told of.
stop_daemon
start_daemon TAPLINED_ABORT_AT=vm-start:create:after
$tapline vm start guest && fail "the daemon did not die"
wait_dead "$daemon" 30
xl domid "$vm" || fail "there is no domain"
start_daemon _=
soon "halted VM" 60 vm_is halted
xl domid "$vm" 2>/dev/null && fail "a domain is left that nobody knows of"

# The guest ends by itself.
start_vm
answer "$vm"
soon "end of the guest" 120 vm_is halted
$tapline vm show guest | grep -q "is halted" && fail "a problem with a guest that has powered off"
no_process || fail "processes are left of a guest that has powered off"
last=$(said "$vm" xvda)

# Somebody else destroys it.
start_vm
expect "what it finds" "$(said "$vm" before)" "$last"
xl destroy "$vm" || fail "xl destroy"
soon "end of the domain" 120 vm_is halted
$tapline vm show guest | grep -q "its domain was destroyed" || fail "nobody says why it is halted"

done_by "start" vm start guest
done_by "end" vm shutdown guest --force
vm_is halted || fail "the VM is not halted"

done_by "destroy" vm destroy guest --yes
stop_daemon
nothing_left
