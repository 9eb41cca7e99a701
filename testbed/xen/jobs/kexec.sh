# Says what its disk holds, writes to it and flushes; then, with requests under way, begins another kernel: by `kexec -e`, or as a kernel
# that has crashed does.
wait_for_disk
held() {
    set -- $(dd if=$disk bs=64k count=32 iflag=direct 2>/dev/null | md5sum)
    echo "$1"
}
say "found=$(held)"
dd if=/dev/urandom of=$disk bs=64k count=32 oflag=direct conv=fsync 2>/dev/null || fail "write"
say "kept=$(held)"
kexec() { /job/lib/ld-linux-x86-64.so.2 --library-path /job/lib /job/kexec "$@"; }
kexec $load /job/vmlinuz "--command-line=$(cat /proc/cmdline)" || fail "kexec $load"
/tools/fio --name=busy --filename=$disk --rw=randrw --bs=16k --iodepth=16 --offset=4m --size=4m --time_based --runtime=60000 \
    --ioengine=libaio --direct=1 --eta=never --output=/tmp/busy &
until [ "$(awk '{ print $1 }' /sys/block/xvda/stat)" -gt 200 ]; do usleep 100000; done
say loaded=yes
read -r _
case $load in
-l) kexec -e ;;
-p)
    echo 1 >/proc/sys/kernel/sysrq
    echo c >/proc/sysrq-trigger
    ;;
esac
fail "the first kernel goes on"
