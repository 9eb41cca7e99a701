# At each line on the console asks for reads and writes of the first disk, says when they are under way, and how they have ended.
wait_for_disk
echo "said by the guest" >/tmp/line
while read -r round; do
    until [ -b $disk ]; do usleep 50000; done
    yes "$(cat /tmp/line), $round" | head -c 65536 >/tmp/content
    rm -f /tmp/ended-*
    for number in 1 2 3 4 5 6 7 8; do
        (dd if=/tmp/content of=$disk bs=64k count=1 seek=$number oflag=direct conv=notrunc 2>/dev/null; echo $? >/tmp/ended-w$number) &
        (dd if=$disk of=/dev/null bs=64k count=1 skip=$((16 + number)) iflag=direct 2>/dev/null; echo $? >/tmp/ended-r$number) &
    done
    sleep 1
    say "asked=$round $(cat /tmp/ended-* 2>/dev/null | wc -l)"
    wait
    say "ended=$round $(cat /tmp/ended-* | tr '\n' ' ')"
    while [ -b $disk ]; do usleep 50000; done
    dmesg -c | grep -i 'I/O error' && fail "the kernel has seen errors"
    say "gone=$round"
done
