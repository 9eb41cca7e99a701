# Two guests with four disks each, all at work at once; dom0 then finds on each what its guest says.
ram_disks 8 12
guest a many "" /dev/ram0 /dev/ram1 /dev/ram2 /dev/ram3
guests_left=4
guest b many "" /dev/ram4 /dev/ram5 /dev/ram6 /dev/ram7
wait_said a end=ok 400
wait_said b end=ok 400
guests_left=0
wait_gone a 60
wait_gone b 60
number=0
for name in a a a a b b b b; do
    disk=$(xvd $((number % 4)))
    expect "disk $disk of guest $name" "$(hash_of /dev/ram$number)" "$(said $name "$disk")"
    number=$((number + 1))
done
