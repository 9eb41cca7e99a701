# Writes more than its disk's storage has room for, and reads it back.
wait_for_disk
dd if=/dev/urandom of=/tmp/content bs=64k count=128 2>/dev/null || fail "content"
say writing=yes
dd if=/tmp/content of=$disk bs=64k oflag=direct conv=fsync 2>/dev/null || fail "write"
dmesg | grep -i 'xvda.*error' && fail "the kernel has seen errors"
dd if=$disk of=/tmp/back bs=64k count=128 iflag=direct 2>/dev/null || fail "read"
cmp /tmp/content /tmp/back || fail "it is not what was written"
