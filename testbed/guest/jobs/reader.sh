# A guest of the daemon that runs tapline-guest and reads until its machine is ended.
wait_for_disk
/job/tapline-guest >/tmp/reader 2>&1 &
say reads=begin
while dd if=$disk of=/dev/null bs=64k count=16 iflag=direct 2>/dev/null; do sleep 1; done
fail "cannot read"
