# Disks on devices with sectors of 4096 and of 512 bytes: the guest sees them as they are.
. /drop/storage.sh
null_disk nullb0 16 4096
null_disk nullb1 16 512
fill /dev/nullb0 4
guest a sectors "disks='xvda xvdb'" /dev/nullb0 /dev/nullb1
wait_said a end=ok 300
expect "the sectors of a disk with 4096 bytes" "$(said a xvda-sectors)" "4096 4096"
expect "logical sectors of a disk with 512 bytes" "$(said a xvdb-sectors | cut -d ' ' -f 1)" 512
expect "the size of both" "$(said a size)" $((16 << 20))
wait_gone a 60
expect "the disk with 4096 bytes" "$(hash_of /dev/nullb0)" "$(said a xvda)"
expect "the disk with 512 bytes" "$(hash_of /dev/nullb1)" "$(said a xvdb)"
e2fsck -f -n /dev/nullb0 || fail "e2fsck in dom0"
