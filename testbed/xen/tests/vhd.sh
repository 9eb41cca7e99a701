# A guest's verified load on a chain of two VHDs: it reads what the base holds, the base stays, and the chain is sound.
. /drop/storage.sh
images 64
fill /tmp/content 16
before=$(hash_of /tmp/content)
image convert raw:/tmp/content vhd:/images/base.vhd --cache writeback
image create vhd:/images/disk.vhd --parent vhd:/images/base.vhd
base=$(hash_of /images/base.vhd)
guest a attach "" vhd:/images/disk.vhd,vhd:/images/base.vhd
wait_end a 300
expect "the disk's content as the guest reads it" "$(said a before)" "$before"
[ "$(said a after)" != "$before" ] || fail "the guest wrote nothing"
expect "the base after the guest" "$(hash_of /images/base.vhd)" "$base"
image check vhd:/images/disk.vhd --parent vhd:/images/base.vhd
image convert vhd:/images/disk.vhd --parent vhd:/images/base.vhd raw:/images/flat.raw
expect "the disk's content after the guest" "$(hash_of /images/flat.raw)" "$(said a after)"
e2fsck -f -n /images/flat.raw || fail "e2fsck in dom0"
