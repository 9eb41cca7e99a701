# Disks named in xl's configuration by its block script: a guest boots with them, and what xl may do with them, and with disks
# of which it does not know, happens as docs/xen.md says; when the guest has shut down nothing is left.
. /drop/life.sh
ram_disks 3 12
xl_names_disks
fill /dev/ram0 4
fill /dev/ram1 2
fill /dev/ram2 2
before=$(hash_of /dev/ram0)
disks="'$(named /dev/ram0 xvda w)','$(named /dev/ram1 xvdb r)'"
guest a scripted ""
wait_said a booted=xvda,xvdb 200
expect "xvda as the guest reads it" "$(said a before)" "$before"
expect "xvdb as the guest reads it" "$(said a xvdb)" "$(hash_of /dev/ram1)"
expect "that the guest may write to xvdb" "$(said a writable)" no
xl block-list a | grep -q 51712.*backend/tapline || { xl block-list a; fail "xl does not show our backend"; }

# Its own disks it can take away.
pid=$(server_of a xvdb)
xl block-detach a xvdb || fail "xl block-detach of its own disk"
wait_said a gone=xvdb 60
wait_dead "$pid" 20
! xl block-list a | grep 51728 || fail "xl still has xvdb"
no_disk "$(xl domid a)" xvdb

# To a guest that runs it cannot give one, and says how.
xl block-attach a "$(named /dev/ram2 xvdd w)" >/tmp/attach 2>&1 && fail "xl block-attach to a guest that runs"
cat /tmp/attach
grep -q 'tapline xen attach' /tmp/attach || fail "it is not said what to do"
# libxl leaves the nodes that it made to the guest's end.
! xenstore-ls "$(end_of a xvdd)" 2>/dev/null || fail "our end of xvdd is there"

# Of what it did not make it knows nothing.
attach a raw:/dev/ram2 xvdc
wait_said a "xvdc=$(hash_of /dev/ram2)" 60
xl block-list a
pid=$(server_of a xvdc)
xl block-detach a xvdc && fail "xl detaches a disk that is not its own"
[ -d "/proc/$pid" ] || fail "xl has ended a disk that is not its own"
$tapline xen detach a xvdc || fail "detach of xvdc"
wait_said a gone=xvdc 60
# And ours can take away its own.
expect "the state of xvda" "$(xenstore-read "$(end_of a xvda)/state")" 4

answer a go
wait_said a written=yes 60
xl shutdown -w a || fail "xl shutdown"
wait_gone a 60
nothing_left
no_xl_nodes
expect "xvda after the guest" "$(hash_of /dev/ram0)" "$(said a after)"
[ "$(said a after)" != "$before" ] || fail "the guest wrote nothing"
