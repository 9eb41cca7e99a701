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
