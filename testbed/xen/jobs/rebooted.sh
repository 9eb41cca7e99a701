# Reads a disk, writes to it, and says what it holds then; goes on writing, or boots anew when a line comes on the console.
disk=/dev/xvda
wait_for_disk
before=$(content_of $disk)
dd if=/dev/urandom of=$disk bs=64k count=32 oflag=direct 2>/dev/null || fail "write"
say "after=$(content_of $disk)"
say "before=$before"
say written=yes
if read -r _; then
    reboot -f
    sleep 60
fi
