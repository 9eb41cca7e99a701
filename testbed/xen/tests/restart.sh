# The processes of four disks are killed under a load that is verified, six times; those that follow take the guest over, which
# sees no error. Then every image is sound and holds what the guest read last.
. /drop/life.sh
images 96
guest a rounds "disks='xvda xvdb xvdc xvdd'"
kill_and_follow() { # NAME
    node=$(end_of a "$1")
    pid=$(server_of a "$1")
    cat "/proc/$pid/cmdline" >/tmp/words
    kill -9 "$pid" || fail "the process of $1 is gone already"
    # The same words, as docs/xen.md says.
    xargs -0 setsid </tmp/words >>"/out/serve-a-$1.log" 2>&1 &
    left=200
    while now=$(xenstore-read "$node/tapline/pid"); [ "$now" = "$pid" ]; do
        [ $left -gt 0 ] || fail "nobody follows on $1"
        left=$((left - 1))
        sleep 0.1
    done
}
formats="raw qcow2 raw qcow2"
grants="auto auto copy copy"
number=0
for format in $formats; do
    disk=$(xvd $number)
    $tapline image create "$format:/images/$disk" --size 8M || fail "create $disk"
    number=$((number + 1))
    policy=$(echo $grants | cut -d ' ' -f $number)
    attach a "$format:/images/$disk" "$disk" --grants "$policy"
done
wait_said a round=1 200
for _ in 1 2 3 4 5 6; do
    for disk in xvda xvdb xvdc xvdd; do kill_and_follow $disk; done
    goes_on a
done
answer a enough
wait_end a 100
nothing_left
for disk in xvda xvdb xvdc xvdd; do
    expect "how often $disk was taken over" "$(grep -c 'the front end is taken over' "/out/serve-a-$disk.log")" 6
done
grep -q 'taken over.*mappings that stay' /out/serve-a-xvda.log || fail "no persistent grants were taken over"
grep -q 'taken over.*by copies' /out/serve-a-xvdc.log || fail "no copies after a take-over"
for disk in xvdb xvdd; do
    $tapline image check "qcow2:/images/$disk" || fail "check $disk"
    $tapline image convert "qcow2:/images/$disk" "raw:/images/$disk.raw" || fail "convert $disk"
done
number=0
for format in $formats; do
    disk=$(xvd $number)
    [ "$format" = raw ] && content=/images/$disk || content=/images/$disk.raw
    expect "what $disk holds" "$(hash_of "$content")" "$(said a "$disk")"
    number=$((number + 1))
done
