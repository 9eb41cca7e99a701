# Disks below another node in the store, backend/vbd3, as other toolstacks call tapdisk's: a guest verifies what it writes to both,
# one comes and goes, the process of the other is replaced under the load, and nothing is left of either.
. /drop/life.sh
kind=vbd3
ram_disks 2 16
guest a plug "rounds=2"
id=$(xl domid a)
attach a raw:/dev/ram0 xvda --backend-kind vbd3
for round in 1 2; do
    wait_said a waiting=$round 200
    fill /dev/ram1 2
    content=$(hash_of /dev/ram1)
    attach a raw:/dev/ram1 xvdb --backend-kind vbd3
    expect "the backend that the guest sees" "$(xenstore-read "/local/domain/$id/device/vbd/51728/backend")" "$(end_of a xvdb)"
    wait_said a plugged=$round 200
    expect "the plugged disk's content" "$(said a content)" "$content"
    pid=$(server_of a xvda)
    $tapline xen upgrade a xvda || fail "upgrade"
    wait_dead "$pid" 1
    [ "$(server_of a xvda)" != "$pid" ] || fail "the process was not replaced"
    $tapline xen list --json >/out/list || fail "list"
    expect "disks of that kind in the list" "$(grep -c '"kind": *"vbd3"' /out/list)" 2
    pid=$(server_of a xvdb)
    $tapline xen detach a xvdb || fail "detach"
    wait_said a gone=$round 60
    wait_dead "$pid" 1
    no_disk "$id" xvdb
done
wait_end a 100
nothing_left
