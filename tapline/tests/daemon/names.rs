//! Tests of selecting objects by name, of their names in errors, and of the tree of disks.

use std::process::Command;

use api::{Code, Problem, Sr, SrSource, Vdi};
use serde_json::json;
use uuid::Uuid;

use crate::objects::{sr, vdi, vm};
use crate::play::{Played, err, ok, out, refused};

const SR: &str = "00005e00-0000-0000-0000-000000000001";
const VDI: &str = "0000d100-0000-0000-0000-000000000001";

fn snapshot(number: u128, name: &str) -> Vdi {
    Vdi { snapshot_of: Some(VDI.parse().unwrap()), read_only: true, users: Vec::new(), ..vdi(number, name) }
}

#[test]
fn a_name_shared_with_snapshots_shows_the_disk() {
    let all = [snapshot(2, "root"), vdi(1, "root"), snapshot(3, "root")];
    let played = Played::new([ok("GET", "vdis?match=root", &all), ok("GET", &format!("vdis/{VDI}"), &vdi(1, "root"))]);
    assert!(out(&played.run(&["vdi", "show", "root"])).contains(VDI));
    played.received();
}

#[test]
fn a_revert_takes_a_snapshot_of_that_disk() {
    let of_others = Vdi { snapshot_of: Some(Uuid::from_u128(9)), ..snapshot(3, "before") };
    let two = "0000d100-0000-0000-0000-000000000002";
    let played = Played::new([
        ok("GET", &format!("vdis/{VDI}"), &vdi(1, "root")),
        ok("GET", "vdis?match=before", &[snapshot(2, "before"), of_others, vdi(4, "before")]),
        ok("GET", &format!("vdis/{two}"), &snapshot(2, "before")),
        ok("POST", &format!("vdis/{VDI}/revert"), &vdi(1, "root")),
    ]);
    assert_eq!(out(&played.run(&["vdi", "revert", VDI, "--snapshot", "before", "--yes"])), "");
    assert_eq!(played.received()[3].body, json!({ "snapshot": two }));
}

#[test]
fn an_ambiguous_name_is_refused_with_what_each_candidate_is() {
    let isos = SrSource::Iso { path: "/isos".parse().unwrap() };
    let srs = [sr(1, "fast"), Sr { source: isos, ..sr(2, "isos") }];
    let iso = Vdi { sr: srs[1].uuid, size: 1 << 20, ..vdi(2, "root") };
    let played = Played::new([
        ok("GET", "vdis?match=root", &[vdi(1, "root"), iso, snapshot(3, "root")]),
        ok("GET", "srs", &srs),
        ok("GET", "vdis?match=root", &[vdi(1, "root"), vdi(2, "root")]),
        ok("GET", "srs", &srs),
    ]);
    let refused = played.run(&["vdi", "show", "root"]);
    assert_eq!(refused.status.code(), Some(64));
    let text = "\
tapline: 'root' is ambiguous; it matches 3 disks:
    KIND      NAME  SR    VIRTUAL  CREATED               UUID
    disk      root  fast   10 GiB  2026-11-22T10:00:00Z  0000d100-0000-0000-0000-000000000001
    ISO       root  isos    1 MiB  2026-11-22T10:00:00Z  0000d100-0000-0000-0000-000000000002
    snapshot  root  fast   10 GiB  2026-11-22T10:00:00Z  0000d100-0000-0000-0000-000000000003
  give the UUID of the one you mean, or its repository: --sr
";
    assert_eq!(err(&refused), text);
    // In one repository, only the UUIDs differ.
    let refused = played.run(&["vdi", "show", "root"]);
    assert!(err(&refused).ends_with("\n  give the UUID of the one you mean\n"), "{}", err(&refused));
}

#[test]
fn a_repository_narrows_a_name() {
    let of_sr = format!("vdis?sr={SR}&match=root");
    let played = Played::new([
        ok("GET", "srs?match=fast", &[sr(1, "fast")]),
        ok("GET", &of_sr, &[vdi(1, "root")]),
        ok("POST", &format!("vdis/{VDI}/merge"), &json!({})),
    ]);
    assert_eq!(out(&played.run(&["vdi", "merge", "root", "--sr", "fast"])), "");
    played.received();
}

#[test]
fn ambiguous_repositories_and_machines_are_listed_with_details() {
    let played = Played::new([
        ok("GET", "srs?match=vms", &[sr(1, "vms"), sr(2, "vms")]),
        ok("GET", "vms?match=web", &[vm(1, "web"), vm(2, "web")]),
    ]);
    let text = err(&played.run(&["sr", "show", "vms"]));
    assert!(text.starts_with("tapline: 'vms' is ambiguous; it matches 2 repositories:\n    NAME  LOCATION"), "{text}");
    assert!(text.contains(&format!("\n    vms   nas:/srv/vms  2026-11-22T10:00:00Z  {SR}\n")), "{text}");
    let text = err(&played.run(&["vm", "show", "web"]));
    assert!(text.contains("\n    web   2026-11-22T10:00:00Z  00004a00-0000-0000-0000-000000000002\n"), "{text}");
}

#[test]
fn an_error_calls_an_object_by_the_name_that_was_given() {
    let busy = |what: &str| Problem::new(Code::InUse, format!("VDI {VDI} {what}")).advise("unplug it first");
    let disk = || ok("GET", "vdis?match=root", &[vdi(1, "root")]);
    let snapshot_of = format!("vdis/{VDI}/snapshot");
    let used = Problem::new(Code::InUse, format!("the repository {SR} is used by VBD 7"));
    let played = Played::new([
        disk(),
        refused("POST", &snapshot_of, &busy("is plugged")),
        disk(),
        refused("POST", &snapshot_of, &busy("is plugged")),
        refused("POST", &snapshot_of, &busy("is plugged")),
        ok("GET", "srs?match=fast", &[sr(1, "fast")]),
        refused("POST", &format!("srs/{SR}/detach"), &used),
    ]);
    let said = err(&played.run(&["vdi", "snapshot", "root"]));
    assert_eq!(said, format!("tapline: disk \"root\" ({VDI}) is plugged\n  unplug it first\n"));
    // JSON output, and a problem about an object given by UUID, are unchanged.
    let said = err(&played.run(&["vdi", "snapshot", "root", "--json"]));
    assert!(said.contains(&format!("\"VDI {VDI} is plugged\"")), "{said}");
    let said = err(&played.run(&["vdi", "snapshot", VDI]));
    assert!(said.starts_with(&format!("tapline: VDI {VDI} is plugged\n")), "{said}");
    let said = err(&played.run(&["sr", "detach", "fast"]));
    assert_eq!(said, format!("tapline: the repository \"fast\" ({SR}) is used by VBD 7\n"));
}

#[test]
fn a_taken_name_is_a_conflict_and_can_be_allowed() {
    let taken = Problem::new(Code::NameTaken, "cannot create VDI 'root': VDI 7 has that name").field("name");
    let played = Played::new([refused("POST", "vdis", &taken), ok("POST", "vdis", &vdi(1, "root"))]);
    let create = ["vdi", "create", "root", "--sr", SR, "--size", "1M"];
    assert_eq!(played.run(&create).status.code(), Some(7));
    out(&played.run(&[&create[..], &["--allow-duplicate-name"]].concat()));
    let asked = played.received();
    assert_eq!(asked[1].body["allow_duplicate_name"], true);
    assert!(asked[0].body.get("allow_duplicate_name").is_none());
}

fn tree(played: &Played, locale: &str, words: &[&str]) -> String {
    let mut tapline = Command::new(env!("CARGO_BIN_EXE_tapline"));
    tapline.args(["vdi", "tree"]).args(words).env("TAPLINE_SOCKET", played.socket()).env_remove("TAPLINE_CONNECT");
    out(&tapline.env("LC_ALL", locale).output().unwrap())
}

#[test]
fn a_tree_has_snapshots_and_clones_below_their_disks() {
    let free = |disk: Vdi| Vdi { users: Vec::new(), physical_utilisation: 3 << 20, ..disk };
    let vdis = [vdi(1, "root"), free(snapshot(2, "root@1")), free(vdi(3, "copy")), free(vdi(4, "data"))];
    let image = |number: u128, parent: Option<u128>| {
        json!({ "uuid": Uuid::from_u128(number), "file": number.to_string(), "format": "vhd", "size": 512,
            "parent": parent.map(Uuid::from_u128) })
    };
    let of = |vdi: &Vdi, image: u128| {
        json!({ "uuid": vdi.uuid, "image": Uuid::from_u128(image), "name": vdi.name, "read_only": false,
            "created": vdi.created })
    };
    let inventory = json!({
        "sr": SR, "name": "fast", "description": "", "tags": [], "other_config": {}, "generation": 7, "head": "00",
        "images": [image(11, Some(12)), image(12, None), image(13, Some(12)), image(14, None)],
        "vdis": [of(&vdis[0], 11), of(&vdis[1], 12), of(&vdis[2], 13), of(&vdis[3], 14)],
    });
    let inventory_path = format!("srs/{SR}/inventory");
    let of_sr = format!("vdis?sr={SR}");
    let scenes =
        || [ok("GET", "vdis", &vdis), ok("GET", "srs", &[sr(1, "fast")]), ok("GET", &inventory_path, &inventory)];
    let played = Played::new(scenes().into_iter().chain(scenes()).chain(scenes()).chain([
        ok("GET", &format!("vdis/{VDI}"), &vdis[0]),
        ok("GET", &of_sr, &vdis),
        ok("GET", "srs", &[sr(1, "fast")]),
        refused("GET", &inventory_path, &Problem::new(Code::State, "it is not attached")),
    ]));
    let text = "\
NAME        VIRTUAL    OWN  CREATED               STATE      UUID      SR
data         10 GiB  3 MiB  2026-11-22T10:00:00Z  ready      0000d100  fast
";
    let unicode = tree(&played, "C.UTF-8", &[]);
    let lines: Vec<&str> = unicode.lines().collect();
    assert_eq!((lines[0], lines[4]), (text.lines().next().unwrap(), text.lines().nth(1).unwrap()), "{unicode}");
    assert!(lines[1].starts_with("root         10 GiB  1 MiB  2026-11-22T10:00:00Z  in use "), "{unicode}");
    assert!(lines[2].starts_with("└─ root@1    10 GiB  3 MiB  2026-11-22T10:00:00Z  read-only "), "{unicode}");
    assert!(lines[3].starts_with("   └─ copy   10 GiB  3 MiB "), "{unicode}");
    let ascii = tree(&played, "C", &[]);
    assert!(ascii.is_ascii() && ascii.contains("\n`- root@1 ") && ascii.contains("\n   `- copy "), "{ascii}");
    let nested: serde_json::Value = serde_json::from_str(&tree(&played, "C", &["--json"])).unwrap();
    assert_eq!(nested[0]["children"][0]["name"], "root@1");
    assert_eq!(nested[0]["children"][0]["children"][0]["name"], "copy");
    assert_eq!((nested.as_array().unwrap().len(), &nested[1]["children"]), (2, &json!([])));
    // One disk, with an unknown inventory of its repository.
    let one = tree(&played, "C", &[VDI]);
    assert_eq!(
        one.lines().map(|line| line.split_whitespace().next().unwrap()).collect::<Vec<_>>(),
        ["NAME", "root", "`-"]
    );
}
