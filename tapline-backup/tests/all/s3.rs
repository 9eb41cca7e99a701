//! Targets in a bucket: of a server in memory, or, with `TAPLINE_TEST_S3=s3://BUCKET` and the variables that Tapline
//! itself uses, of a real one.

use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use testkit::certificates::Authority;
use testkit::s3_server::{Bucket, Fault};

use crate::killed::{children, kill_backups};
use crate::room::{Room, begun, id};
use crate::trouble::back_up_and_prune_at_once;

const TARGET: &str = "s3://bucket/of/tests";

/// An empty target on a server without faults, which is a real one if there is one.
fn sound() -> (Option<Bucket>, Room) {
    let Ok(real) = std::env::var("TAPLINE_TEST_S3") else {
        let (bucket, room) = bucket();
        return (Some(bucket), room);
    };
    let target = format!("{real}/{:016x}", fastrand::u64(..));
    let room = Room::with_bucket(&target, Vec::new());
    let made = room.run(&["target", "create", &target]);
    assert_eq!(made.code, 0, "{made:?}");
    (None, room)
}

/// A bucket with an empty target.
fn bucket() -> (Bucket, Room) {
    let bucket = Bucket::start();
    let room = Room::with_bucket(TARGET, bucket.environment());
    let made = room.run(&["target", "create", TARGET]);
    assert_eq!(made.code, 0, "{made:?}");
    (bucket, room)
}

/// A full and an incremental backup, a clone that costs nothing, a prune.
fn exercise(room: &Room) {
    room.image("a.raw", 48, 1);
    let first = room.back_up("raw:a.raw", "a", &[]);
    let clone = room.back_up("raw:a.raw", "b", &[]);
    assert!(clone["statistics"]["sent"].as_u64().unwrap() < 1 << 20, "{clone}");
    room.restores(id(&first), "a.raw");
    room.restores(id(&clone), "a.raw");
    room.image("a.raw", 48, 2);
    let second = room.back_up("raw:a.raw", "a", &[]);
    let pruned = room.run(&["prune", &room.target, "--keep-last", "1", "--grace", "0"]);
    assert_eq!(pruned.code, 0, "{pruned:?}");
    assert_eq!(room.list().len(), 2);
    room.restores(id(&second), "a.raw");
    room.verify();
}

#[test]
fn backups_are_kept_in_a_bucket_beside_other_objects() {
    let (bucket, room) = bucket();
    bucket.put("of/tests-2/format", b"another");
    bucket.put("other", b"of others");
    exercise(&room);
    assert!(bucket.names().contains(&"of/tests/format".to_owned()), "{:?}", bucket.names());
    let again = room.run(&["target", "create", TARGET]);
    again.failed(7, "a backup target already");
    bucket.damage("of/tests/packs/");
    let verified = room.run(&["verify", TARGET]);
    assert_eq!(verified.code, 2, "{verified:?}");
}

#[test]
fn what_is_not_of_the_target_is_spared_below_its_prefix() {
    let (bucket, room) = bucket();
    let nested = format!("{TARGET}/backups/host1");
    assert_eq!(room.run(&["target", "create", &nested]).code, 0);
    for other in ["backups/mysql/full-2026", "packs/others", "packs/00/others"] {
        bucket.put(&format!("of/tests/{other}"), b"of others");
    }
    let others = bucket.names();
    exercise(&room);
    for _ in 0..2 {
        assert_eq!(room.run(&["prune", TARGET, "--grace", "0"]).code, 0);
    }
    let left = bucket.names();
    let is_log = |name: &String| name.starts_with("of/tests/log/");
    let lost: Vec<_> = others.iter().filter(|name| !is_log(name) && !left.contains(name)).collect();
    assert!(lost.is_empty(), "{lost:?}");
    assert_eq!(room.run(&["list", &nested]).code, 0);
}

#[test]
fn a_bucket_keeps_what_a_directory_does() {
    let (_bucket, room) = sound();
    exercise(&room);
}

#[test]
fn lost_answers_conflicts_and_a_busy_server_change_nothing() {
    for fault in [Fault::LostAnswers, Fault::Conflicts, Fault::Busy] {
        let bucket = Bucket::start();
        bucket.set(fault);
        let room = Room::with_bucket(TARGET, bucket.environment());
        let made = room.run(&["target", "create", TARGET]);
        assert_eq!(made.code, 0, "{fault:?}: {made:?}");
        exercise(&room);
    }
}

#[test]
fn changes_whose_outcome_is_unknown_are_repeated() {
    let resets = Bucket::start();
    let silent = Bucket::start();
    silent.set(Fault::Silent);
    let patient = ("AWS_READ_TIMEOUT", "2s".to_owned());
    for environment in [resets.behind_resets(), [silent.environment(), vec![patient]].concat()] {
        let room = Room::with_bucket(TARGET, environment);
        let made = room.run(&["target", "create", TARGET]);
        assert_eq!(made.code, 0, "{made:?}");
        exercise(&room);
    }
}

#[test]
fn a_server_that_never_answers_is_given_up_with_the_number_of_attempts() {
    let bucket = Bucket::start();
    bucket.set(Fault::Mute);
    let environment = [bucket.environment(), vec![("AWS_READ_TIMEOUT", "100ms".to_owned())]].concat();
    let room = Room::with_bucket(TARGET, environment.clone());
    room.run(&["target", "create", TARGET]).failed(4, "5 attempts in ");
    // One that is interrupted is not repeated.
    let room = Room::with_bucket(TARGET, environment[..4].to_vec());
    let mut child = room.command(&["target", "create", TARGET]).stderr(Stdio::piped()).spawn().unwrap();
    let before = bucket.names().len();
    while bucket.names().len() == before {
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(4));
    assert_eq!(bucket.names().len(), before + 1);
    let invalid = Room::with_bucket(TARGET, vec![environment[2].clone(), ("AWS_READ_TIMEOUT", "0".to_owned())]);
    invalid.run(&["target", "create", TARGET]).failed(64, "AWS_READ_TIMEOUT=60s");
}

#[test]
fn a_redirected_change_is_refused() {
    let (bucket, room) = bucket();
    room.image("a.raw", 4, 1);
    let before = bucket.names();
    for status in [301, 302, 303, 307, 308] {
        bucket.set(Fault::Redirects(status));
        let made = room.run(&["create", TARGET, "raw:a.raw", "--name", "a"]);
        made.failed(4, "set AWS_REGION and AWS_ENDPOINT_URL");
        made.failed(4, &format!("status {status}) to /bucket"));
    }
    assert_eq!(bucket.names(), before);
}

#[test]
fn the_process_that_serves_an_image_has_no_keys() {
    let (_bucket, room) = bucket();
    room.image("a.raw", 400, 1);
    let mut child = begun(&room, &["create", TARGET, "raw:a.raw", "--name", "a"], 1);
    let serving = children(&child);
    let environment = std::fs::read(format!("/proc/{}/environ", serving[0].as_raw_nonzero())).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let text = String::from_utf8_lossy(&environment);
    assert!(text.contains("TMPDIR=") && !text.contains("AWS_"), "{text}");
}

#[test]
fn a_key_in_a_file_and_an_authority_are_used_instead_of_the_environment() {
    let bucket = Bucket::start();
    let others = [("AWS_ACCESS_KEY_ID", "other"), ("AWS_SECRET_ACCESS_KEY", "other"), ("AWS_REGION", "other")];
    let others = others.map(|(name, value)| (name, value.to_owned())).to_vec();
    let room = Room::with_bucket(TARGET, [others, vec![("AWS_ENDPOINT_URL", "http://127.0.0.1:1".into())]].concat());
    let authority = Authority::new(&room.path("authority")).unwrap();
    let server = authority.server().unwrap();
    let url = bucket.url_behind_tls(&server);
    let file = room.path("credentials");
    std::fs::write(&file, "[default]\naws_access_key_id = key\naws_secret_access_key = secret\n").unwrap();
    let mode = |mode| std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
    let (file, ca) = (file.to_str().unwrap(), server.join("ca-cert.pem"));
    let words = |verb: &[&str], more: &[&str]| {
        room.run(&[verb, &[TARGET, "--credentials", file, "--endpoint", &url, "--region", "here"], more].concat())
    };
    let trusted = ["--ca-file", ca.to_str().unwrap()];
    mode(0o640);
    words(&["target", "create"], &trusted).failed(64, "with mode 640");
    mode(0o600);
    assert_eq!(words(&["target", "create"], &trusted).code, 0);
    assert_eq!(words(&["list"], &trusted).code, 0);
    words(&["list"], &[]).failed(4, "is not reachable");
    words(&["list"], &["--ca-file", file]).failed(64, "cannot read certificates");
    room.run(&["list", "t", "--endpoint", &url]).failed(64, "--endpoint is for a target in S3");
}

#[test]
fn killed_backups_in_a_bucket_do_not_count() {
    let (_bucket, room) = sound();
    kill_backups(&room);
}

#[test]
fn hosts_share_a_bucket() {
    let (_bucket, room) = sound();
    back_up_and_prune_at_once(&room);
}

#[test]
fn a_server_that_replaces_objects_is_refused() {
    let bucket = Bucket::start();
    bucket.set(Fault::Replaces);
    let room = Room::with_bucket(TARGET, bucket.environment());
    room.run(&["target", "create", TARGET]).failed(4, "If-None-Match");
    assert!(bucket.names().is_empty(), "{:?}", bucket.names());
    bucket.set(Fault::None);
    assert_eq!(room.run(&["target", "create", TARGET]).code, 0);
    // Another server has been put in its place.
    bucket.set(Fault::Replaces);
    room.image("a.raw", 4, 1);
    let made = room.run(&["create", TARGET, "raw:a.raw", "--name", "a"]);
    made.failed(4, "If-None-Match");
}

#[test]
fn troubles_of_a_bucket_are_named() {
    let (bucket, room) = bucket();
    room.image("a.raw", 8, 1);
    let create = ["create", TARGET, "raw:a.raw", "--name", "a"];
    for (fault, code, text) in [
        (Fault::Full, 9, "the target is full"),
        (Fault::Denied, 4, "check the credentials"),
        (Fault::Gone, 4, "the server has no such bucket"),
    ] {
        bucket.set(fault);
        room.run(&create).failed(code, text);
    }
    bucket.set(Fault::None);
    room.run(&["list", "s3://bucket/nothing"]).failed(6, "create a target");
    room.run(&["list", "s3://elsewhere/x"]).failed(4, "NoSuchBucket");
    room.run(&["list", "s3://bu cket"]).failed(64, "s3://BUCKET/PREFIX");
    bucket.put("used/by-others.txt", b"a");
    room.run(&["target", "create", "s3://bucket/used"]).failed(7, "by-others.txt");
    room.run(&["target", "create", "s3://bucket"]).failed(7, "is not empty");
    let unset = Room::with_bucket(TARGET, bucket.environment()[..2].to_vec());
    unset.run(&["list", TARGET]).failed(64, "AWS_ACCESS_KEY_ID");
    let away = vec![("AWS_ENDPOINT_URL", "http://127.0.0.1:1".to_owned())];
    let room = Room::with_bucket(TARGET, [&bucket.environment()[1..], &away].concat());
    room.run(&["list", TARGET]).failed(4, "is not reachable");
}
