//! `null:SIZE`: a disk without a file, for measurements. It completes requests, warns about what it is, and is refused
//! wherever data would be lost in it.

use serde_json::json;
use testkit::nbd::Client;

use crate::tool::Room;
use crate::tool::control::Control;
use crate::tool::replaced::Replaced;
use crate::tool::served::Disk;

#[test]
fn it_is_measured_and_shown_as_what_it_is() {
    let room = Room::new();
    let measured = room.json("image bench null:1G --count 1000 --depth 16 --pattern random");
    assert_eq!((&measured["requests"], &measured["image"]), (&json!(1000), &json!("null:1G")));
    room.done("image bench null:1G --count 100 --overwrite-data");
    let shown = room.json("image info null:1G");
    assert_eq!(
        (&shown[0]["stores_nothing"], &shown[0]["size"], &shown[0]["file_allocated"]),
        (&json!(true), &json!(1 << 30), &json!(0))
    );
    assert!(room.done("image info null:1G").contains("stores NOTHING"));
    assert!(!room.file("1G").exists(), "no file is made");
}

#[test]
fn a_model_takes_its_time_and_stores_nothing_either() {
    let room = Room::new();
    let begun = std::time::Instant::now();
    let measured = room.json("image bench model:disk,size=1G --count 20 --depth 1 --pattern random");
    // 8 ms for each seek, except one that may need none.
    assert!(begun.elapsed() >= std::time::Duration::from_millis(19 * 8), "{measured}");
    // The speed of such storage can be measured without a guest.
    let measured = room.json("image bench model:nvme --size 512K --depth 1 --count 50 --io-split 16K --io-merge 32K");
    assert_eq!((&measured["split"], &measured["merge"]), (&json!(16384), &json!(32768)));
    assert_eq!(room.tapline("image bench model:nvme --io-split auto").code, Some(64));
    assert!(room.done("image info model:nvme").contains("stores NOTHING"));
    let mut disk = Replaced::serve(&room, "model:nvme,size=64M --nbd nbd.sock");
    let mut nbd = Client::connect(&room.file("nbd.sock")).unwrap();
    nbd.write(0, &[1; 4096]).unwrap();
    let upgrade = disk.upgrade();
    disk.replaced_by(&upgrade.join().unwrap());
    nbd.read(0, 4096).unwrap();
    nbd.flush().unwrap();
    let layers = Control::connect(&room.file("control.sock")).done(&json!({ "verb": "layers" }));
    assert_eq!(
        (&layers["layers"][0]["format"], &layers["layers"][0]["path"]),
        (&json!("model"), &json!("nvme,size=64M"))
    );
    disk.stop();
    let said = room.tapline("image bench model:tape");
    assert!(said.err.contains("use one of nvme, sata-ssd, disk, array"), "{said:?}");
}

#[test]
fn where_data_would_be_lost_it_is_refused() {
    let room = Room::new();
    room.done("image create raw:a --size 1M");
    let refused = [
        "image create null:1M --size 1M",
        "image convert raw:a null:1M",
        "image convert null:1M raw:b",
        "image check null:1M",
        "image resize null:1M --size 2M",
        "image create qcow2:c --parent null:1M",
        "serve raw:a --parent null:1M --nbd nbd.sock",
    ];
    for words in refused {
        let said = room.tapline(words);
        assert_eq!(said.code, Some(64), "{words}: {said:?}");
        assert!(said.err.contains("'null:1M' stores nothing"), "{words}: {said:?}");
    }
    let said = room.tapline("serve null:1M --parent raw:a --nbd nbd.sock");
    assert!(said.err.contains("cannot have or be parents"), "{said:?}");
    let said = room.tapline("serve null:1M --io-engine aio --nbd nbd.sock");
    assert!(said.err.contains("leave --io-engine out"), "{said:?}");
    let said = room.tapline("serve null:1 --nbd nbd.sock");
    assert!(said.err.contains("as in null:10G"), "{said:?}");
}

#[test]
fn it_is_served_and_no_verb_makes_another_image_of_it() {
    let room = Room::new();
    let disk = Disk::serve(&room, "null:64M --nbd nbd.sock --control control.sock");
    let mut nbd = Client::connect(&room.file("nbd.sock")).unwrap();
    nbd.write(4096, &[1; 4096]).unwrap();
    nbd.read(0, 1 << 20).unwrap();
    nbd.flush().unwrap();
    let mut control = Control::connect(&room.file("control.sock"));
    let layers = control.done(&json!({ "verb": "layers" }));
    assert_eq!((&layers["layers"][0]["format"], &layers["layers"][0]["path"]), (&json!("null"), &json!("64M")));
    let to = room.file("b");
    let image = format!("qcow2:{}", to.display());
    let verbs = [
        json!({ "verb": "snapshot", "to": image }),
        json!({ "verb": "clone", "of": 0, "to": image }),
        json!({ "verb": "resize", "size": 128 << 20 }),
        json!({ "verb": "revert", "to": 0, "leaf": image }),
    ];
    for verb in verbs {
        let (kind, why) = control.refused(&verb);
        assert_eq!(kind, "unsupported", "{verb}: {why}");
    }
    assert!(!to.exists());
    let (code, said) = disk.stop();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("stores NOTHING"), "{said}");
}

#[test]
fn an_upgrade_serves_it_again() {
    let room = Room::new();
    let mut disk = Replaced::serve(&room, "null:64M --nbd nbd.sock");
    let mut nbd = Client::connect(&room.file("nbd.sock")).unwrap();
    nbd.write(0, &[1; 4096]).unwrap();
    let upgrade = disk.upgrade();
    disk.replaced_by(&upgrade.join().unwrap());
    nbd.write(0, &[1; 4096]).unwrap();
    disk.stop();
}
