# A PVH guest begins another kernel while it uses its disk, by kexec and as one that crashes. Linux tells Xen of it, and xl can make a
# guest's devices anew only for HVM guests (libxl_domain_soft_reset): a PVH guest it destroys, or boots anew if it is told so. Then the
# disk is there with all that was flushed, from another process, and nothing is left of the first.
. /drop/life.sh
ram_disks 1 12
xl_names_disks
mkdir /tmp/lib
for each in $(/lib64/ld-linux-x86-64.so.2 --list /usr/sbin/kexec | tr ' \t' '\n\n' | grep '^/'); do cp -L "$each" /tmp/lib/ || fail "$each"; done
beside_job="/guest/vmlinuz /usr/sbin/kexec /tmp/lib"
disks="'$(named /dev/ram0 xvda w)'"

# kexec_after WORD: a guest in which kexec loads a kernel by that word.
kexec_after() {
    guest a kexec "load=$1"
    wait_said a loaded=yes 200
    kept=$(said a kept)
    pid=$(server_of a xvda)
    id=$(xl domid a)
    answer a go
}

# By itself xl destroys it.
kexec_after -l
wait_gone a 120
nothing_left
grep -q "shutdown reason code 5 is soft-reset" /var/log/xen/xl-a.log || { cat /var/log/xen/xl-a.log; fail "it was no soft reset"; }
set -- $(dd if=/dev/ram0 bs=64k count=32 2>/dev/null | md5sum)
expect "what was flushed" "$1" "$kept"

# Told so it boots it anew, also one that crashes.
at_start() { printf "disk=[%s]\non_soft_reset='restart'\n" "$disks"; }
kernel_words=crashkernel=96M
kexec_after -p
# The panic that its console tells of is no failure.
soon "boot after the crash" 300 has_said a "found=$kept"
[ "$(server_of a xvda)" != "$pid" ] && [ "$(xl domid a)" != "$id" ] || fail "it did not boot anew"
wait_dead "$pid" 20
no_disk "$id" xvda
xl destroy a || fail "xl destroy"
wait_gone a 60
nothing_left
no_xl_nodes
