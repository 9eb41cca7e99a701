# A disk of mode r: the guest reads all of it, nothing that it tries changes it.
. /drop/storage.sh
ram_disks 1 16
file_system /dev/ram0 /mnt
fill /mnt/file 2
content=$(sha256sum </mnt/file)
umount /mnt || fail "umount"
before=$(hash_of /dev/ram0)
guest a readonly "" r:/dev/ram0
wait_end a 200
expect "what the guest's kernel says of the disk" "$(said a ro)" 1
expect "the disk's content as the guest reads it" "$(said a content)" "$before"
expect "a file's content as the guest reads it" "$(said a file)" "${content%% *}"
expect "the disk after the guest" "$(hash_of /dev/ram0)" "$before"
