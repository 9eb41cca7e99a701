//! Tests of the requests and the output of the nouns' verbs, with recorded responses.

use crate::objects::{done, sr, task, vbd, vdi, vm};
use crate::play::{self, Played, begun, err, ok, out, refused, scene};
use api::{Code, Problem};
use serde_json::json;

const SR: &str = "00005e00-0000-0000-0000-000000000001";
const VDI: &str = "0000d100-0000-0000-0000-000000000001";
const VBD: &str = "0000bd00-0000-0000-0000-000000000001";
const VM: &str = "00004a00-0000-0000-0000-000000000001";
const TASK: &str = "00007a00-0000-0000-0000-000000000001";

#[test]
fn a_list_is_a_table_or_the_apis_json() {
    // No forecast, because its text depends on the current time.
    let space = |full| sr(1, "fast").space.map(|space| api::Space { forecast: None, full, ..space });
    let health = api::Health { state: api::HealthState::Full, ..api::Health::default() };
    let slow = api::Sr { space: space(true), health, ..sr(2, "slow") };
    let srs = vec![api::Sr { space: space(false), ..sr(1, "fast") }, slow];
    let played = Played::new([ok("GET", "srs", &srs), ok("GET", "srs?match=a%20b", &srs)]);
    let table = "\
UUID      NAME  STATE     VIRTUAL    USED    FREE  OVERCOMMIT  FULL IN     SIZE  LOCATION
00005e00  fast  attached  200 GiB  40 GiB  50 GiB        2.0x        -  100 GiB  nas:/srv/vms
00005e00  slow  full      200 GiB  40 GiB  50 GiB        2.0x      now  100 GiB  nas:/srv/vms
";
    assert_eq!(out(&played.run(&["sr", "list"])), table);
    let listed: Vec<api::Sr> = serde_json::from_str(&out(&played.run(&["sr", "list", "a b", "--json"]))).unwrap();
    assert_eq!(listed, srs);
    played.received();
}

#[test]
fn wide_tables_have_whole_uuids() {
    let played = Played::new([ok("GET", &format!("vdis?sr={SR}"), &[vdi(1, "root")])]);
    let text = out(&played.run(&["vdi", "list", "--sr", SR, "--wide"]));
    let row = format!("{VDI}  root   10 GiB  1 MiB  in use  qcow2   {SR}");
    assert!(text.contains(&row), "{text}");
    assert!(text.contains("RW 0000bd00-0000-0000-0000-000000000001"), "{text}");
}

#[test]
fn show_prints_all_fields() {
    let played =
        Played::new([ok("GET", "srs?match=fast", &[sr(1, "fast")]), ok("GET", &format!("srs/{SR}"), &sr(1, "fast"))]);
    let text = out(&played.run(&["sr", "show", "fast"]));
    for line in [
        &format!("       uuid: {SR}\n"),
        "       full: 2027-01-31T00:00:00Z, at 1 GiB per day\n",
        "    formats: qcow2, vhd\n",
        "      notes: the server says when it is durable\n",
        "description: for tests\n",
    ] {
        assert!(text.contains(line), "{line:?} is not in\n{text}");
    }
}

#[test]
fn a_refusal_shows_its_advice_and_no_field() {
    let problem = Problem::new(Code::NoSpace, "cannot make a vdi of 10 GiB: 1 GiB is free")
        .field("size")
        .advise("free some, or lower the reserve: tapline sr set fast --reserve 0");
    let played = Played::new([refused("POST", "vdis", &problem)]);
    let output = played.run(&["vdi", "create", "root", "--sr", SR, "--size", "10G"]);
    assert_eq!(output.status.code(), Some(9));
    assert_eq!(
        err(&output),
        "tapline: cannot make a vdi of 10 GiB: 1 GiB is free\n  \
         free some, or lower the reserve: tapline sr set fast --reserve 0\n"
    );
}

#[test]
fn sr_create_sends_the_storage_in_the_apis_form() {
    let sources: [(&[&str], serde_json::Value); 4] = [
        (&["--dir", "/srv"], json!({"type": "dir", "path": "/srv"})),
        (
            &["--nfs", "nas:/vms", "--nfs-version", "4.2"],
            json!({"type": "nfs", "server": "nas", "export": "/vms", "version": "4.2"}),
        ),
        (
            &["--smb", "//nas/vms/a", "--credentials", "/etc/nas"],
            json!({"type": "smb", "server": "nas", "share": "vms/a", "credentials": "/etc/nas"}),
        ),
        (&["--iso", "/srv/iso"], json!({"type": "iso", "path": "/srv/iso"})),
    ];
    for (words, source) in sources {
        let played = Played::new([ok("POST", "srs", &sr(1, "fast"))]);
        let words = [&["sr", "create", "fast", "--reserve", "10G", "--format", "vhd"], words].concat();
        assert_eq!(out(&played.run(&words)), format!("{SR}\n"));
        let asked =
            json!({"name": "fast", "description": "", "source": source, "reserve": 10_u64 << 30, "format": "vhd"});
        assert_eq!(played.received()[0].body, asked);
    }
}

#[test]
fn invalid_arguments_are_refused_before_any_request() {
    let wrong: [&[&str]; 20] = [
        &["sr", "create", "fast"],
        &["sr", "create", "fast", "--dir", "/a", "--iso", "/b"],
        &["sr", "create", "fast", "--smb", "//nas/vms"],
        &["sr", "create", "fast", "--dir", "/a", "--credentials", "/b"],
        &["sr", "probe", "--iso", "/a", "--nfs-version", "4"],
        &["sr", "create", "a\u{1b}", "--dir", "/a"],
        &["sr", "set", "fast"],
        &["vdi", "resize", "root"],
        &["vdi", "resize", "root", "10G", "--size", "10G"],
        &["vdi", "create", "root", "--sr", "fast", "--size", "10GB"],
        &["vdi", "create", "root", "--sr", "fast", "--size", "10G", "--format", "vmdk"],
        &["vbd", "create", "--vdi", "root", "--position", "255"],
        &["vbd", "connect", "0000", "--for", "bhyve"],
        &["vm", "create", "a", "--memory", "1G", "--cmdline", "quiet"],
        &["vm", "set", "a"],
        &["vm", "set", "a", "--kernel", "/a", "--boot-disk"],
        &["vm", "set", "a", "--initrd", "/a", "--boot-disk"],
        &["vm", "set", "a", "--autostart=tries=0"],
        &["vm", "set", "a", "--autostart", "--no-autostart"],
        &["vbd", "set", "0000"],
    ];
    let played = Played::new([]);
    for words in wrong {
        assert_eq!(played.run(words).status.code(), Some(64), "{words:?}");
    }
    assert!(played.received().is_empty());
}

#[test]
fn verbs_of_an_sr_use_their_routes() {
    let scan = json!({"appeared": [], "missing": [], "returned": [], "unplaced": [], "counts": {"images": 3}});
    let found = [json!({"uuid": SR, "name": "fast", "known": false, "images": 3})];
    let image = json!({"uuid": VDI, "file": "a.vhd", "format": "vhd", "size": 1 << 30});
    let of_it = json!({
        "uuid": VDI, "image": VDI, "name": "web", "read_only": false, "created": "2026-11-23T12:00:00Z",
    });
    let inventory = json!({
        "sr": SR, "name": "fast", "description": "", "tags": [], "other_config": {}, "generation": 7, "head": "00",
        "images": [image], "vdis": [of_it],
    });
    let played = Played::new([
        ok("POST", "srs/probe", &found),
        ok("POST", "srs/introduce", &sr(1, "fast")),
        ok("POST", &format!("srs/{SR}/attach"), &sr(1, "fast")),
        ok("POST", &format!("srs/{SR}/attach"), &sr(1, "fast")),
        ok("GET", &format!("srs/{SR}/inventory"), &inventory),
        ok("POST", "srs/inventory", &inventory),
        begun("POST", &format!("srs/{SR}/scan"), &task(1, api::TaskState::Running, 0.0, None)),
        ok("GET", &format!("tasks/{TASK}?wait=1"), &done(1, scan)),
        ok("PATCH", &format!("srs/{SR}"), &sr(1, "fast")),
        scene("POST", &format!("srs/{SR}/detach"), 200, serde_json::to_vec(&sr(1, "fast")).unwrap()),
        scene("POST", &format!("srs/{SR}/forget"), 204, ""),
    ]);
    let probed = out(&played.run(&["sr", "probe", "--dir", "/srv"]));
    assert_eq!(probed, format!("UUID{:34}NAME  KNOWN  IMAGES\n{SR}  fast  false       3\n", ""));
    assert_eq!(out(&played.run(&["sr", "introduce", "fast", "--dir", "/srv", "--uuid", SR])), format!("{SR}\n"));
    assert_eq!(out(&played.run(&["sr", "attach", SR])), "");
    assert_eq!(out(&played.run(&["sr", "attach", SR, "--believe", "repository"])), "");
    let told = out(&played.run(&["sr", "inventory", SR]));
    assert!(told.starts_with(&format!("sr 'fast' ({SR}), generation 7\nUUID")), "{told}");
    assert!(told.contains(&format!("{VDI}  web")) && told.contains("a.vhd"), "{told}");
    assert_eq!(out(&played.run(&["sr", "inventory", "/srv/vms"])), told);
    assert_eq!(out(&played.run(&["sr", "scan", SR])), "    files  3 images\n");
    assert_eq!(out(&played.run(&["sr", "set", SR, "--reserve", "0"])), "");
    assert_eq!(out(&played.run(&["sr", "detach", SR])), "");
    assert_eq!(out(&played.run(&["sr", "forget", SR])), "");
    assert_eq!(played.received()[8].body, json!({"reserve": 0}));
}

#[test]
fn verbs_of_a_vdi_use_their_routes() {
    let verb = |verb: &str| format!("vdis/{VDI}/{verb}");
    let of = |verb_: &str| ok("POST", &verb(verb_), &vdi(1, "root"));
    let played = Played::new([
        of("resize"),
        of("snapshot"),
        of("clone"),
        ok("GET", &format!("vdis/{VDI}"), &vdi(1, "root")),
        ok("GET", &format!("vdis/{VDI}"), &vdi(1, "root")),
        of("revert"),
        of("copy"),
        ok("POST", "vdis/import", &vdi(1, "root")),
        of("export"),
        of("merge"),
    ]);
    let made = format!("{VDI}\n");
    assert_eq!(out(&played.run(&["vdi", "resize", VDI, "20G"])), "");
    assert_eq!(out(&played.run(&["vdi", "snapshot", VDI, "--name", "before"])), made);
    assert_eq!(out(&played.run(&["vdi", "clone", VDI])), made);
    assert_eq!(out(&played.run(&["vdi", "revert", VDI, "--snapshot", VDI, "--yes"])), "");
    assert_eq!(out(&played.run(&["vdi", "copy", VDI, "--sr", SR, "--format", "raw"])), made);
    let import = ["vdi", "import", "root", "/srv/a.vhd", "--sr", SR, "--source-format", "vhd"];
    assert_eq!(out(&played.run(&import)), made);
    assert_eq!(out(&played.run(&["vdi", "export", VDI, "/srv/a.raw", "--format", "raw"])), "");
    assert_eq!(out(&played.run(&["vdi", "merge", VDI])), "");
    let bodies: Vec<_> = played.received().into_iter().map(|asked| asked.body).filter(|body| !body.is_null()).collect();
    assert_eq!(
        bodies,
        [
            json!({"size": 20_u64 << 30}),
            json!({"name": "before", "description": ""}),
            json!({"description": ""}),
            json!({"snapshot": VDI}),
            json!({"sr": SR, "format": "raw"}),
            json!({"sr": SR, "name": "root", "description": "", "path": "/srv/a.vhd", "source_format": "vhd"}),
            json!({"path": "/srv/a.raw", "format": "raw"}),
        ]
    );
}

#[test]
fn a_dry_run_only_reports_what_would_be_destroyed() {
    let played = Played::new([
        ok("GET", &format!("vdis/{VDI}"), &vdi(1, "root")),
        ok("DELETE", &format!("vdis/{VDI}?dry_run=true"), &json!({"removes": ["a.qcow2"], "freed": 7, "needed_by": 0})),
        ok("GET", &format!("srs/{SR}"), &sr(1, "fast")),
        scene("DELETE", &format!("srs/{SR}"), 204, ""),
    ]);
    assert_eq!(
        out(&played.run(&["vdi", "destroy", VDI, "--dry-run"])),
        format!("would destroy disk \"root\" ({VDI})\nwould free 7 B, and remove the file a.qcow2\n")
    );
    assert_eq!(out(&played.run(&["sr", "destroy", SR, "--yes"])), "");
    played.received();
}

#[test]
fn without_a_terminal_a_loss_needs_yes() {
    let played = Played::new([
        ok("GET", &format!("vdis/{VDI}"), &vdi(1, "root")),
        ok("GET", "vms?match=web", &[vm(1, "web")]),
        ok("GET", &format!("vms/{VM}"), &vm(1, "web")),
    ]);
    let refused = played.run(&["vdi", "destroy", VDI]);
    let why = "not confirmed, as there is no terminal: nothing was done\n  \
               to confirm it, add --yes, which is required without a terminal";
    assert_eq!(err(&refused), format!("tapline: destroy disk \"root\" ({VDI}): {why}\n"));
    assert_eq!(refused.status.code(), Some(64));
    // The user may mean virsh's command for a forced power-off.
    let refused = played.run(&["vm", "destroy", "web"]);
    let instead = "to cut the machine's power, use: tapline vm shutdown --force web";
    let what = format!("destroy the vm 'web' ({VM}) with its block devices");
    assert_eq!(err(&refused), format!("tapline: {what}: {why}; {instead}\n"));
    assert_eq!(refused.status.code(), Some(64));
    assert!(played.received().iter().all(|asked| asked.what.starts_with("GET ")));
}

#[test]
fn verbs_of_a_vbd_use_their_routes() {
    let played = Played::new([
        ok("GET", "vms?match=web", &[vm(1, "web")]),
        ok("GET", "vdis?match=root", &[vdi(1, "root")]),
        ok("POST", "vbds", &vbd(1)),
        ok("GET", &format!("vbds?vm={VM}"), &[vbd(1)]),
        ok("GET", "vms", &[vm(1, "web")]),
        ok("GET", "vdis", &[vdi(1, "root")]),
        ok("GET", "vbds?match=0000bd", &[vbd(1)]),
        ok("POST", &format!("vbds/{VBD}/plug"), &vbd(1)),
        ok("GET", &format!("vbds/{VBD}"), &vbd(1)),
        ok("POST", &format!("vbds/{VBD}/unplug"), &vbd(1)),
        ok("GET", &format!("vbds/{VBD}"), &vbd(1)),
        scene("GET", &format!("vbds/{VBD}/connect?for=cloud-hypervisor"), 200, "--disk vhost_user=true\n"),
        scene("DELETE", &format!("vbds/{VBD}"), 204, ""),
    ]);
    let create = ["vbd", "create", "--vdi", "root", "--vm", "web", "--mode", "RO", "--position", "3"];
    assert_eq!(out(&played.run(&create)), format!("{VBD}\n"));
    let listed = out(&played.run(&["vbd", "list", "--vm", VM]));
    assert!(listed.contains("0000bd00  -   root         3  RW    plugged  vhost-user       2"), "{listed}");
    assert_eq!(out(&played.run(&["vbd", "plug", "0000bd"])), "");
    assert_eq!(out(&played.run(&["vbd", "unplug", VBD, "--force"])), "");
    assert_eq!(out(&played.run(&["vbd", "connect", VBD, "--for", "cloud-hypervisor"])), "--disk vhost_user=true\n");
    assert_eq!(out(&played.run(&["vbd", "destroy", VBD])), "");
    let asked = played.received();
    assert_eq!(asked[2].body, json!({"vm": VM, "vdi": VDI, "position": 3, "mode": "RO"}));
    assert_eq!(asked[9].body, json!({"force": true}));
}

#[test]
fn many_vbds_are_plugged_and_unplugged_in_one_task() {
    let played = Played::new([
        ok("POST", "vbds/plug", &json!({"done": 2})),
        ok("GET", "vms?match=web", &[vm(1, "web")]),
        ok("GET", &format!("vbds?vm={VM}"), &[vbd(1)]),
        ok("POST", "vbds/unplug", &json!({"done": 2})),
    ]);
    assert_eq!(out(&played.run(&["vbd", "plug", VBD, VDI])), "");
    assert_eq!(out(&played.run(&["vbd", "unplug", "--vm", "web", "--force"])), "");
    let asked = played.received();
    assert_eq!(asked[0].body, json!({"vbds": [VBD, VDI], "force": false}));
    assert_eq!(asked[3].body, json!({"vm": VM, "force": true}));
    assert_eq!(played.run(&["vbd", "plug"]).status.code(), Some(64));
    assert_eq!(played.run(&["vbd", "plug", VBD, "--vm", "web"]).status.code(), Some(64));
}

#[test]
fn verbs_of_a_vm_use_their_routes() {
    let played = Played::new([
        ok("POST", "vms", &vm(1, "web")),
        ok("GET", "vms", &[vm(1, "web")]),
        ok("POST", &format!("vms/{VM}/start"), &vm(1, "web")),
        ok("POST", &format!("vms/{VM}/pause"), &vm(1, "web")),
        ok("POST", &format!("vms/{VM}/resume"), &vm(1, "web")),
        ok("POST", &format!("vms/{VM}/shutdown"), &vm(1, "web")),
        ok("GET", &format!("vms/{VM}"), &vm(1, "web")),
        scene("DELETE", &format!("vms/{VM}"), 204, ""),
    ]);
    let create = ["vm", "create", "web", "--memory", "1G", "--kernel", "/boot/k", "--platform", "usb=true"];
    assert_eq!(out(&played.run(&create)), format!("{VM}\n"));
    let table = "UUID      NAME  POWER   MEMORY  VCPUS  DRIVER  PROBLEM\n00004a00  web   halted   1 GiB      2  qemu\n";
    assert_eq!(out(&played.run(&["vm", "list"])), table);
    for verb in ["start", "pause", "resume"] {
        assert_eq!(out(&played.run(&["vm", verb, VM])), "");
    }
    assert_eq!(out(&played.run(&["vm", "shutdown", VM, "--force-after", "30"])), "");
    assert_eq!(out(&played.run(&["vm", "destroy", VM, "--yes"])), "");
    let asked = played.received();
    let boot = json!({"from": "kernel", "kernel": "/boot/k", "cmdline": ""});
    let body = json!({"name": "web", "description": "", "driver": "qemu", "memory": 1 << 30, "vcpus": 1, "boot": boot,
        "platform": {"usb": "true"}});
    assert_eq!(asked[0].body, body);
    assert_eq!(asked[5].body, json!({"force": false, "force_after": 30}));
}

#[test]
fn autostart_is_set_and_cleared() {
    let vms = || ok("PATCH", &format!("vms/{VM}"), &vm(1, "web"));
    let vbds = || ok("PATCH", &format!("vbds/{VBD}"), &vbd(1));
    let played = Played::new([vms(), vms(), vms(), vbds(), vbds()]);
    for words in [["--autostart"], ["--autostart=order=2,delay=30"], ["--no-autostart"]] {
        assert_eq!(out(&played.run(&[&["vm", "set", VM][..], &words].concat())), "");
    }
    for words in [["--autostart=tries=9"], ["--no-autostart"]] {
        assert_eq!(out(&played.run(&[&["vbd", "set", VBD][..], &words].concat())), "");
    }
    let how = |order, delay, tries| json!({"autostart": {"order": order, "delay": delay, "tries": tries}});
    let none = json!({ "autostart": null });
    let wanted = [how(0, 0, 5), how(2, 30, 5), none.clone(), how(0, 0, 9), none];
    assert_eq!(played.received().into_iter().map(|asked| asked.body).collect::<Vec<_>>(), wanted);
}

#[test]
fn platform_keys_are_changed_individually() {
    let played =
        Played::new([ok("GET", &format!("vms/{VM}"), &vm(1, "web")), ok("PATCH", &format!("vms/{VM}"), &vm(1, "web"))]);
    let set = ["vm", "set", VM, "--platform", "hvm_serial=pty", "--no-platform", "usb", "--memory", "2G"];
    assert_eq!(out(&played.run(&set)), "");
    let body = json!({"memory": 2_u64 << 30, "platform": {"hvm_serial": "pty", "parallel": "none"}});
    assert_eq!(played.received()[1].body, body);
}

#[test]
fn shells_complete_verbs_and_options() {
    let directory = tempfile::tempdir().unwrap();
    let script = |shell: &str| {
        let path = directory.path().join(shell);
        std::fs::write(&path, out(&play::run("/nowhere".as_ref(), &["completion", shell]))).unwrap();
        path
    };
    // As bash does: the words, the index of the one to complete, and the preceding word.
    let complete = format!(
        "source {}; COMP_WORDS=(tapline $@); COMP_CWORD=$#; _clap_complete_tapline tapline \"${{@: -1}}\" \"${{@: -2:1}}\"; echo ${{COMPREPLY[@]}}",
        script("bash").display()
    );
    let completed = |words: &[&str]| {
        let programs = std::path::Path::new(env!("CARGO_BIN_EXE_tapline")).parent().unwrap();
        let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
        let mut bash = std::process::Command::new("bash");
        let bash = bash.args(["-c", &complete, "bash"]).args(words).env("PATH", path).output().unwrap();
        String::from_utf8(bash.stdout).unwrap()
    };
    assert_eq!(completed(&["sr", "intr"]), "introduce\n");
    assert_eq!(completed(&["vdi", "create", "--form"]), "--format\n");
    assert_eq!(completed(&["vdi", "create", "--format", "q"]), "qcow2\n");
    // Commands of the disk program are completed as well.
    assert_eq!(completed(&["image", "conv"]), "convert\n");
    for shell in ["zsh", "fish"] {
        assert!(std::fs::read_to_string(script(shell)).unwrap().contains("TAPLINE_COMPLETE"));
    }
    assert_eq!(play::run("/nowhere".as_ref(), &["completion", "csh"]).status.code(), Some(64));
}
