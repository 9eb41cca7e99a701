# Reads xvda, and xvdb, which it may not write to; says of xvdb and xvdc when they come and go; then writes to xvda and waits.
mkdir -p /sbin
printf '#!/bin/sh\nexec /bin/poweroff -f\n' >/sbin/poweroff
chmod +x /sbin/poweroff
for each in xvda xvdb; do
    disk=/dev/$each
    wait_for_disk
done
say "before=$(content_of /dev/xvda)"
say "xvdb=$(content_of /dev/xvdb)"
dd if=/dev/zero of=/dev/xvdb bs=4k count=1 oflag=direct 2>/dev/null && say writable=yes || say writable=no
say booted=xvda,xvdb
while [ -b /dev/xvdb ]; do usleep 50000; done
say gone=xvdb
until [ -b /dev/xvdc ]; do usleep 50000; done
say "xvdc=$(content_of /dev/xvdc)"
while [ -b /dev/xvdc ]; do usleep 50000; done
say gone=xvdc
read -r _
dd if=/dev/urandom of=/dev/xvda bs=64k count=32 oflag=direct 2>/dev/null || fail "write"
say "after=$(content_of /dev/xvda)"
say written=yes
while :; do sleep 60; done
