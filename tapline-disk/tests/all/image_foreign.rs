//! VMDK and VHDX as created by QEMU: read, converted and compared, and nothing else.

use crate::tool::{Room, Said, noise};

const MIB: u64 = 1 << 20;

/// Images that QEMU creates from a raw disk: their names, and the options.
const MADE: [(&str, &str); 6] = [
    ("vmdk:a", "-O vmdk -o subformat=monolithicSparse"),
    ("vmdk:a", "-O vmdk -o subformat=streamOptimized"),
    ("vmdk:a", "-O vmdk -o subformat=monolithicSparse,zeroed_grain=on"),
    ("vhdx:a", "-O vhdx -o subformat=dynamic"),
    ("vhdx:a", "-O vhdx -o subformat=fixed"),
    ("vhdx:a", "-O vhdx -o subformat=dynamic,block_size=1M"),
];

#[test]
fn images_that_qemu_makes_hold_the_same_for_us() {
    let room = Room::new();
    // Several grain tables, and the last grain and block in part.
    room.make_raw("a.raw", 101 * MIB + 512);
    for (image, options) in MADE {
        room.tool("qemu-img", &format!("convert -f raw {options} a.raw a"));
        assert_eq!(room.json(&format!("image compare raw:a.raw {image}"))["same"], true, "{options}");
        for target in ["raw:b", "qcow2:b", "vhd:b"] {
            room.done(&format!("image convert {image} {target} --verify --force"));
            assert_eq!(room.json(&format!("image compare raw:a.raw {target}"))["same"], true, "{options} {target}");
        }
        room.done(&format!("image convert {image} qcow2:b --compress --io-engine aio --force"));
        room.tool("qemu-img", "compare -f raw -F qcow2 a.raw b");
        let map = room.json(&format!("image map {image}"));
        let stored = map.as_array().unwrap().iter().filter(|run| run["data"] == true);
        let stored: u64 = stored.map(|run| run["length"].as_u64().unwrap()).sum();
        assert!(options.contains("fixed") || stored < 100 * MIB, "{options}: {stored}");
    }
}

#[test]
fn info_says_what_kind_of_image_it_is() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    for ((image, options), kind) in
        MADE.into_iter().zip(["monolithicSparse", "streamOptimized", "monolithicSparse", "dynamic", "fixed", "dynamic"])
    {
        room.tool("qemu-img", &format!("convert -f raw {options} a.raw a"));
        let info = &room.json(&format!("image info {image}"))[0];
        let format = image.split(':').next().unwrap();
        assert_eq!((&info["format"], &info["size"]), (&format.into(), &(16 * MIB).into()), "{info}");
        assert_eq!(info[format]["kind"], kind, "{info}");
        assert!(room.done(&format!("image info {image}")).contains(&format!("kind      {kind}\n")));
    }
}

#[test]
fn images_of_other_hypervisors_are_only_read() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    for image in ["vmdk:a", "vhdx:a"] {
        let format = image.split(':').next().unwrap();
        room.tool("qemu-img", &format!("convert -f raw -O {format} a.raw a"));
        let before = room.read("a");
        for words in [
            format!("serve {image} --nbd ./a.sock"),
            format!("serve {image} --nbd ./a.sock --read-only"),
            format!("image create qcow2:b --parent {image}"),
            format!("image create {format}:b --size 1G"),
            format!("image convert raw:a.raw {format}:b"),
            format!("image snapshot {image} --to qcow2:b"),
            format!("image clone {image} --to qcow2:b"),
            format!("image resize {image} --size 1G"),
            format!("image compact {image}"),
            format!("image check {image}"),
            format!("image measure {image} --format {format}"),
        ] {
            let said = room.tapline(&words);
            assert!(matches!(said.code, Some(4 | 64)), "{words}: {said:?}");
            assert!(said.err.contains("only read") || said.err.contains("it must be raw"), "{words}: {said:?}");
            assert!(!room.file("b").exists(), "{words}");
        }
        assert!(room.read("a") == before, "{image} was changed");
        room.done(&format!("image measure {image} --format qcow2"));
        room.done("image create qcow2:c --size 16M");
        let said = room.tapline(&format!("image rebase qcow2:c --onto {image} --unsafe"));
        assert!(said.code == Some(4) && said.err.contains("only read"), "{said:?}");
        std::fs::remove_file(room.file("c")).unwrap();
    }
}

#[test]
fn an_image_in_several_files_and_a_wrong_format_are_refused_with_advice() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    room.tool("qemu-img", "convert -f raw -O vmdk -o subformat=twoGbMaxExtentSparse a.raw a.vmdk");
    for (image, advice) in [
        ("vmdk:a.vmdk", "qemu-img convert -f vmdk"),
        ("vmdk:a-s001.vmdk", "qemu-img convert -f vmdk"),
        ("vhdx:a.vmdk", "the descriptor of a VMDK"),
        ("raw:a-s001.vmdk", "give it as vmdk:a-s001.vmdk"),
    ] {
        let said = room.tapline(&format!("image info {image}"));
        assert!(matches!(said.code, Some(4 | 64)) && said.err.contains(advice), "{image}: {said:?}");
    }
}

#[test]
fn what_can_be_read_of_a_damaged_image_is_salvaged() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    room.tool("qemu-img", "convert -f raw -O vmdk -o subformat=streamOptimized a.raw a");
    let mut bytes = room.read("a");
    // The first grain, behind its marker: at the first sector with its number and a length.
    let grain = (128..).find(|n| bytes[n * 512..n * 512 + 8] == [0; 8] && bytes[n * 512 + 8] != 0).unwrap() * 512;
    bytes[grain + 12..grain + 40].fill(0xee);
    room.write("a", &bytes);
    let said = room.tapline("image convert vmdk:a raw:b");
    assert!(said.code == Some(4) && said.err.contains("--salvage"), "{said:?}");
    let said = room.tapline("image convert vmdk:a raw:b --salvage");
    assert!(said.code == Some(2) && said.out.contains("bytes 0 to 65535"), "{said:?}");
    assert!(room.read("b")[64 << 10..] == room.read("a.raw")[64 << 10..]);
}

/// Returns the command that a refusal recommends, between the first backquotes behind `word`.
fn advised(said: &Said, word: &str) -> String {
    let advice = said.err.split('`').skip(1).step_by(2).find(|command| command.starts_with(word));
    advice.unwrap_or_else(|| panic!("{said:?}")).to_owned()
}

/// Executes it, with `NEW` as the name of the new file.
fn follow(room: &Room, command: &str) {
    let said = room.run_words("sh", &["-c", command]);
    assert_eq!(said.code, Some(0), "{command}: {said:?}");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn images_cut_off_inside_their_last_block_are_refused_and_salvaged() {
    let room = Room::new();
    let disk = noise(1, 32 << 20);
    room.write("a.raw", &disk);
    room.done("image create qcow2:c --size 32M");
    for (image, options) in MADE.into_iter().filter(|(_, options)| !options.contains("streamOptimized")) {
        room.tool("qemu-img", &format!("convert -f raw {options} a.raw a"));
        let whole = room.read("a");
        room.write("a", &whole[..whole.len() - 40_000]);
        for words in [
            format!("image convert {image} raw:b"),
            format!("image convert {image} qcow2:b --compress"),
            format!("image compare raw:a.raw {image}"),
            format!("image map {image}"),
        ] {
            let said = room.tapline(&words);
            assert_eq!(said.code, Some(4), "{options} {words}: {said:?}");
            let has = format!("which has only {} bytes", whole.len() - 40_000);
            assert!(said.err.contains("are missing") && said.err.contains(&has), "{options}: {said:?}");
            assert!(said.err.contains("--salvage") && !room.file("b").exists(), "{options} {words}: {said:?}");
        }
        let said = room.tapline(&format!("image convert {image} raw:b --salvage --force"));
        assert!(said.code == Some(2) && said.out.contains(" to 33554431"), "{options}: {said:?}");
        let there = disk.len() - 45_056;
        let salvaged = room.read("b");
        assert!(salvaged[..there] == disk[..there] && salvaged[there + 8192..].iter().all(|&byte| byte == 0));
        std::fs::remove_file(room.file("b")).unwrap();
        // Behind the last block there is nothing to lose.
        room.write("a", &[&whole[..], &[0; 700]].concat());
        room.done(&format!("image compare raw:a.raw {image}"));
    }
}

/// The log has a change of the block allocation table that the table lacks: QEMU replays it.
#[test]
fn a_log_with_an_entry_is_refused_with_advice_that_works() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    room.tool("qemu-img", "convert -f raw -O vhdx -o subformat=dynamic a.raw a");
    let mut file = room.read("a");
    let number = |file: &[u8], at: usize| u64::from_le_bytes(file[at..at + 8].try_into().unwrap());
    let regions = 192 << 10;
    let bat_guid = [0x66, 0x77, 0xc2, 0x2d, 0x23, 0xf6, 0x00, 0x42];
    let bat = (0..2).map(|n| regions + 16 + n * 32).find(|&at| file[at..at + 8] == bat_guid).unwrap();
    let bat = usize::try_from(number(&file, bat + 16)).unwrap();
    let log = usize::try_from(number(&file, (64 << 10) + 72)).unwrap();
    let len = file.len() as u64;
    let table = file[bat..bat + 4096].to_vec();
    file[bat..bat + 4096].fill(0);
    let mut entry = vec![0; 8192];
    entry[..4].copy_from_slice(b"loge");
    entry[8..12].copy_from_slice(&8192u32.to_le_bytes());
    entry[16] = 1;
    entry[24] = 1;
    entry[32..48].fill(0x55);
    entry[48..56].copy_from_slice(&len.to_le_bytes());
    entry[56..64].copy_from_slice(&len.to_le_bytes());
    entry[64..68].copy_from_slice(b"desc");
    entry[68..72].copy_from_slice(&table[4092..]);
    entry[72..80].copy_from_slice(&table[..8]);
    entry[80..88].copy_from_slice(&(bat as u64).to_le_bytes());
    entry[88] = 1;
    entry[4096..4100].copy_from_slice(b"data");
    entry[4104..8188].copy_from_slice(&table[8..4092]);
    entry[8188] = 1;
    file[log..log + 8192].copy_from_slice(&sealed(entry));
    for at in [64 << 10, 128 << 10] {
        let mut header = file[at..at + 4096].to_vec();
        header[48..64].fill(0x55);
        file[at..at + 4096].copy_from_slice(&sealed(header));
    }
    room.write("a", &file);
    let said = room.tapline("image convert vhdx:a raw:b");
    assert!(said.code == Some(4) && said.err.contains("its log holds changes"), "{said:?}");
    follow(&room, &advised(&said, "qemu-img check"));
    room.done("image convert vhdx:a raw:b");
    room.done("image compare raw:a.raw raw:b");
}

/// Sets the CRC-32C behind the signature.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes[4..8].fill(0);
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    let crc = !bytes.iter().fold(u32::MAX, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), step));
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    bytes
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn packed_files_are_no_raw_disks_and_unpack_as_advised() {
    let room = Room::new();
    room.make_raw("a", 4 * MIB);
    for (program, pack) in [
        ("gzip", "gzip -c a > p"),
        ("xz", "xz -c a > p"),
        ("zstd", "zstd -qc a > p"),
        ("bzip2", "bzip2 -c a > p"),
        ("tar", "tar -cf p a"),
    ] {
        if room.run_words("sh", &["-c", &format!("command -v {program}")]).code != Some(0) {
            eprintln!("skipped: there is no {program}");
            continue;
        }
        follow(&room, pack);
        std::fs::rename(room.file("a"), room.file("a.raw")).unwrap();
        for format in ["raw", "vmdk", "vhdx", "qcow2", "vhd"] {
            let said = room.tapline(&format!("image convert {format}:p qcow2:b"));
            assert!(
                matches!(said.code, Some(4 | 64)) && said.err.contains("unpack it"),
                "{format} {program}: {said:?}"
            );
            follow(&room, &advised(&said, program).replace("NEW", "a"));
            room.done("image compare raw:a.raw raw:a");
        }
        room.done("image convert raw:p raw:b --really-raw");
        std::fs::remove_file(room.file("b")).unwrap();
    }
    room.write("p", &[]);
    for format in ["raw", "vmdk", "vhdx", "qcow2", "vhd"] {
        let said = room.tapline(&format!("image convert {format}:p raw:b"));
        assert!(matches!(said.code, Some(4 | 64)) && said.err.contains("the file is empty"), "{format}: {said:?}");
    }
}

/// Descriptors and extents of VMware, and the recommended commands for each.
#[test]
fn descriptors_and_extents_are_converted_as_advised() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    room.tool("qemu-img", "convert -f raw -O vmdk -o subformat=monolithicFlat a.raw a.vmdk");
    let said = room.tapline("image convert vmdk:a-flat.vmdk raw:b");
    assert!(said.err.contains("give it as raw:a-flat.vmdk"), "{said:?}");
    room.done("image compare raw:a.raw raw:a-flat.vmdk");
    let text = String::from_utf8(room.read("a.vmdk")).unwrap();
    for other in [false, true] {
        if other {
            room.write("a.vmdk", text.replace("# Disk DescriptorFile", "# Disk Descriptor File").as_bytes());
        }
        for name in ["raw:a.vmdk", "vmdk:a.vmdk", "qcow2:a.vmdk"] {
            let said = room.tapline(&format!("image convert {name} raw:b"));
            assert!(said.err.contains("the descriptor of a VMDK"), "{said:?}");
            follow(&room, &advised(&said, "qemu-img").replace("NEW", "new"));
            room.done("image compare raw:a.raw qcow2:new");
        }
    }
    for (begins, kind) in [(&b"COWD\x01\0\0\0"[..], "COWD"), (b"\xbe\xba\xfe\xca\0\0\0\0", "SESPARSE")] {
        room.write("x.vmdk", &[begins, &[0; 4096]].concat());
        let said = room.tapline("image convert vmdk:x.vmdk raw:b");
        assert!(said.err.contains(kind) && said.err.contains("give the descriptor"), "{said:?}");
    }
}

/// The descriptors of VMDKs differ between programs.
#[test]
fn descriptors_vary_and_a_snapshot_is_refused() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    room.tool("qemu-img", "convert -f raw -O vmdk -o subformat=monolithicSparse a.raw a");
    let whole = room.read("a");
    let with = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let mut file = whole.clone();
        let at = file.windows(from.len()).position(|bytes| bytes == from.as_bytes()).unwrap();
        file[at..at + to.len()].copy_from_slice(to.as_bytes());
        room.write("a", &file);
    };
    for (from, to) in [("createType=", "createTypo="), ("monolithicSparse", "monolithicsparse")] {
        with(from, to);
        room.done("image compare raw:a.raw vmdk:a");
    }
    with("parentCID=ffffffff", "parentCID=00000000");
    let said = room.tapline("image convert vmdk:a raw:b");
    assert!(said.code == Some(4) && said.err.contains("names no other file"), "{said:?}");
    follow(&room, &advised(&said, "qemu-img").replace("NEW", "new"));
    room.done("image compare raw:a.raw qcow2:new");
}

/// The last grain decompresses to fewer bytes than the disk has there.
#[test]
fn a_grain_with_too_few_bytes_is_named_and_salvaged() {
    let room = Room::new();
    let disk = noise(1, 2050 * 512);
    room.write("a.raw", &disk);
    room.tool("qemu-img", "convert -f raw -O vmdk -o subformat=streamOptimized a.raw a");
    let mut file = room.read("a");
    let marker = (0..file.len()).step_by(512).rfind(|&at| file[at..at + 8] == 2048u64.to_le_bytes()).unwrap();
    let sums = [7u8; 700]
        .iter()
        .fold((1u32, 0u32), |(a, b), &byte| ((a + u32::from(byte)) % 65521, (b + a + u32::from(byte)) % 65521));
    let (a, b) = sums;
    let stream =
        [&[0x78, 1, 1][..], &700u16.to_le_bytes(), &(!700u16).to_le_bytes(), &[7; 700], &(b << 16 | a).to_be_bytes()]
            .concat();
    file[marker + 8..marker + 12].copy_from_slice(&u32::try_from(stream.len()).unwrap().to_le_bytes());
    file[marker + 12..marker + 12 + stream.len()].copy_from_slice(&stream);
    room.write("a", &file);
    let said = room.tapline("image convert vmdk:a raw:b");
    assert!(
        said.code == Some(4) && said.err.contains("does not decompress") && said.err.contains("--salvage"),
        "{said:?}"
    );
    let said = room.tapline("image convert vmdk:a raw:b --salvage");
    assert!(said.code == Some(2) && said.out.contains("bytes 1048576 to 1049599"), "{said:?}");
    assert!(room.read("b")[..1 << 20] == disk[..1 << 20]);
}

/// The guest that wrote the disk finds its partitions by sectors of this size.
#[test]
fn a_conversion_that_loses_the_size_of_sectors_says_so() {
    let room = Room::new();
    room.make_raw("a.raw", 16 * MIB);
    room.tool("qemu-img", "convert -f raw -O vhdx a.raw a");
    let mut file = room.read("a");
    let find = |what: &[u8]| file.windows(what.len()).position(|bytes| bytes == what).unwrap();
    let (table, item) = (find(b"metadata"), find(&[0x1d, 0xbf, 0x41, 0x81, 0x6f, 0xa9, 0x09, 0x47]));
    let at = table + usize::try_from(u32::from_le_bytes(file[item + 16..item + 20].try_into().unwrap())).unwrap();
    let said = room.tapline("image convert vhdx:a qcow2:b");
    assert!(said.code == Some(0) && !said.err.contains("sectors"), "{said:?}");
    assert_eq!(file[at..at + 4], 512u32.to_le_bytes());
    file[at..at + 4].copy_from_slice(&4096u32.to_le_bytes());
    room.write("a", &file);
    for target in ["raw:b", "qcow2:b", "vhd:b", "qcow2:b --compress"] {
        let said = room.tapline(&format!("image convert vhdx:a {target} --force"));
        assert!(said.code == Some(0) && said.err.contains("--logical-block-size 4096"), "{target}: {said:?}");
    }
}
