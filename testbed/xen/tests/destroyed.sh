# Guests are destroyed, one after the other, while they write as much as they can: to a process that copies, to one whose mappings
# stay, and to one that maps for each request. None stays a zombie, and no process, lock, node or channel is left of any.
. /drop/life.sh
ram_disks 1 24
for policy in copy persistent map; do
    guest a busy ""
    attach a raw:/dev/ram0 xvda --grants $policy
    wait_said a busy=yes 200
    id=$(xl domid a)
    [ "$(granted "$id")" -gt 0 ] || fail "no page of the guest is seen to be held"
    xl destroy a || fail "xl destroy"
    wait_gone a 60
    nothing_left
    before=$(hash_of /dev/ram0)
    sleep 1
    expect "the disk after its guest's end" "$(hash_of /dev/ram0)" "$before"
    grep 'grants by' /out/serve-a-xvda.log | tail -n 1
done
