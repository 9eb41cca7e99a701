# The processes of four disks are killed under a load that is verified, six times; those that follow take the guest over, which
# sees no error. Then every image is sound and holds what the guest read last.
. /drop/life.sh
images 96
guest a rounds "disks='xvda xvdb xvdc xvdd'"
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
    for disk in xvda xvdb xvdc xvdd; do
        kill_server a $disk
        follow a $disk
    done
    goes_on a
done
answer a enough
wait_end a 100
nothing_left
for disk in xvda xvdb xvdc xvdd; do
    expect "how often $disk was taken over" "$(grep -c 'the front end is taken over' "/out/serve-a-$disk.log")" 6
done
grep -q 'taken over.*persistent mapping' /out/serve-a-xvda.log || fail "no persistent grants were taken over"
grep -q 'taken over.*by copies' /out/serve-a-xvdc.log || fail "no copies after a take-over"
for disk in xvdb xvdd; do
    $tapline image check "qcow2:/images/$disk" || [ $? -eq 5 ] || fail "check $disk"
    $tapline image convert "qcow2:/images/$disk" "raw:/images/$disk.raw" || fail "convert $disk"
done
number=0
for format in $formats; do
    disk=$(xvd $number)
    [ "$format" = raw ] && content=/images/$disk || content=/images/$disk.raw
    expect "what $disk holds" "$(hash_of "$content")" "$(said a "$disk")"
    number=$((number + 1))
done
