//! Backups are listed, shown, removed and retained by a rule.

use crate::room::{Room, id};

#[test]
fn a_rule_removes_what_it_shows() {
    let room = Room::new();
    room.image("a.raw", 8, 1);
    let ids: Vec<String> = (0..3).map(|_| id(&room.back_up("raw:a.raw", "a", &[])).to_owned()).collect();
    room.image("b.raw", 8, 2);
    let other = room.back_up("raw:b.raw", "b", &[]);
    let shown = room.run(&["prune", "t", "--keep-last", "1", "--dry-run", "--json"]).json();
    let shown = shown["would-remove"].as_array().unwrap();
    assert_eq!(shown.len(), 2);
    assert_eq!(room.list().len(), 4);
    let removed = room.run(&["prune", "t", "--keep-last", "1", "--json"]).json();
    assert_eq!(removed["removed"], serde_json::Value::from(shown.clone()));
    let left = room.list();
    assert_eq!(left.len(), 2);
    assert!(left.iter().any(|backup| ids.iter().any(|own| own == id(backup))));
    left.iter()
        .for_each(|backup| room.restores(id(backup), if backup["id"] == other["id"] { "b.raw" } else { "a.raw" }));
    room.run(&["prune", "t", "--keep-daily", "0"]).failed(64, "no backup at all");
    room.run(&["prune", "t", "--name", "a"]).failed(64, "rule");
    assert_eq!(room.run(&["prune", "t"]).code, 0);
    assert_eq!(room.list().len(), 2);
}

#[test]
fn backups_are_removed_by_id_all_or_none() {
    let room = Room::new();
    room.image("a.raw", 8, 1);
    room.image("b.raw", 8, 2);
    let (a, b) = (room.back_up("raw:a.raw", "a", &[]), room.back_up("raw:b.raw", "b", &[]));
    room.run(&["remove", "t", id(&a), &"0".repeat(32)]).failed(6, "no backup");
    room.run(&["remove", "t", "00"]).failed(64, "first 8");
    assert_eq!(room.list().len(), 2);
    assert_eq!(room.run(&["remove", "t", &id(&a)[..8]]).code, 0);
    assert_eq!(room.list().len(), 1);
    room.restores(id(&b), "b.raw");
    let stored = room.run(&["target", "show", "t", "--json"]).json()["stored"].as_u64().unwrap();
    assert!(stored < 3 << 20, "{stored} bytes are stored of 2 MiB that are needed");
}

#[test]
fn lists_are_of_one_disk_or_of_all() {
    let room = Room::new();
    room.image("a.raw", 4, 1);
    let made = room.back_up("raw:a.raw", "a\u{1b}[2J", &[]);
    room.back_up("raw:a.raw", "b", &[]);
    assert_eq!(room.run(&["list", "t", "--name", "b", "--json"]).json().as_array().unwrap().len(), 1);
    let listed = room.run(&["list", "t"]);
    assert!(listed.out.lines().count() == 3 && !listed.out.contains('\u{1b}'), "{listed:?}");
    let shown = room.run(&["show", "t", id(&made)]);
    assert!(shown.code == 0 && shown.out.contains(made["content"].as_str().unwrap()) && !shown.out.contains('\u{1b}'));
    assert_eq!(room.run(&["show", "t", id(&made), "--json"]).json()["statistics"], made["statistics"]);
}

#[test]
fn the_disks_of_a_machine_at_a_moment_are_retained_or_removed_together() {
    let room = Room::new();
    room.image("a.raw", 4, 1);
    room.image("b.raw", 4, 2);
    let at = |disk: &str, moment: &str| {
        let words = ["--machine", "web", "--moment", moment, "--disks", "2"];
        id(&room.back_up(&format!("raw:{disk}.raw"), disk, &words)).to_owned()
    };
    let first = [at("a", "1"), at("b", "1")];
    let second = [at("a", "2"), at("b", "2")];
    let alone = id(&room.back_up("raw:a.raw", "a", &[])).to_owned();
    // Of a third moment one disk is there only.
    let third = at("a", "3");
    let prune = |words: &[&str]| room.run(&[&["prune", "t", "--keep-last", "1", "--json"], words].concat()).json();
    let removed = |pruned: &serde_json::Value| -> Vec<String> {
        pruned["removed"].as_array().unwrap().iter().map(|backup| id(backup).to_owned()).collect()
    };
    let of_disk = prune(&["--name", "b"]);
    assert_eq!((removed(&of_disk).len(), &of_disk["unjudged"]), (0, &serde_json::json!(2)));
    let pruned = prune(&["--machine", "web"]);
    let mut gone = removed(&pruned);
    gone.sort();
    let mut expected = first.to_vec();
    expected.sort();
    assert_eq!((gone, &pruned["unjudged"]), (expected, &serde_json::json!(1)));
    let left: Vec<String> = room.list().iter().map(|backup| id(backup).to_owned()).collect();
    assert_eq!(left, [second[0].clone(), second[1].clone(), alone, third.clone()]);
    let text = room.run(&["prune", "t", "--keep-last", "1"]).out;
    assert!(text.contains("are retained whatever the rule"), "{text}");
    assert!(room.run(&["show", "t", &third]).out.contains("one of its 2 disks"));
    room.run(&["create", "t", "raw:a.raw", "--name", "a", "--moment", "1"]).failed(64, "--disks");
    room.run(&["prune", "t", "--machine", "web"]).failed(64, "rule");
}
