# A guest with one disk reads what dom0 wrote, makes a filesystem, verifies what it writes; dom0 then finds the guest's bytes.
ram_disks 1 24
fill /dev/ram0 4
before=$(hash_of /dev/ram0)
guest a attach "" /dev/ram0
wait_end a 300
expect "the disk's content as the guest reads it" "$(said a before)" "$before"
expect "the disk's content after the guest" "$(hash_of /dev/ram0)" "$(said a after)"
[ "$(said a after)" != "$before" ] || fail "the guest wrote nothing"
e2fsck -f -n /dev/ram0 || fail "e2fsck in dom0"
