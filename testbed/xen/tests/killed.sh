# A guest is killed under load; nothing of its disk is left behind, and another guest uses the same disk.
ram_disks 1 24
guest a busy "" /dev/ram0
wait_said a busy=yes 200
xl destroy a || fail "xl destroy"
wait_gone a 60
# Fails while anyone still has the disk open for itself.
before=$(hash_of /dev/ram0)
sleep 2
expect "the disk after the guest's end" "$(hash_of /dev/ram0)" "$before"
guest b attach "" /dev/ram0
wait_end b 300
expect "what the second guest finds" "$(said b before)" "$before"
expect "the disk after the second guest" "$(hash_of /dev/ram0)" "$(said b after)"
