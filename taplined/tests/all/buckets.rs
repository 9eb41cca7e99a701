//! Backup targets in buckets of S3: the key for the server is in a file, and nowhere else.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};
use testkit::s3_server::{Bucket, Fault};

use crate::backups::program;
use crate::harness::disks::{io, nbd, plug, unplug, vbd};
use crate::harness::{Taplined, start, wait_until};

const TARGET: &str = "s3://bucket/of/tests";
const SECRET: &str = "Tk9USElORy1UTy1CRS1TRUVO";

/// A bucket with a target, and a daemon with the key in a file.
struct Bed {
    daemon: Taplined,
    bucket: Bucket,
}

impl Bed {
    fn new() -> Bed {
        let bed = Bed { daemon: start(), bucket: Bucket::start() };
        bed.write_key("key", 0o600);
        let made = program().args(["target", "create", TARGET]).envs(bed.bucket.environment()).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        bed
    }

    fn write_key(&self, id: &str, mode: u32) {
        let file = self.daemon.room().join("credentials");
        let text = format!("[default]\naws_access_key_id = {id}\naws_secret_access_key = {SECRET}\n");
        fs::write(&file, text).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn add(&self, path: &str) -> (u16, Value) {
        let s3 = json!({ "credentials": self.daemon.room().join("credentials"), "endpoint": self.bucket.url() });
        self.daemon.post("/backup-targets", json!({ "name": "cloud", "path": path, "s3": s3 }))
    }

    /// The command lines and environments of the processes that use the target.
    fn processes(&self) -> Vec<String> {
        let pids = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
        let read = |path: std::path::PathBuf| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
        let (room, url) = (self.daemon.room().to_str().unwrap(), self.bucket.url());
        let lines = pids.map(|pid| (read(pid.join("cmdline")), pid)).filter(|(line, _)| line.contains(room));
        let ours = lines.filter(|(line, _)| line.contains(TARGET) && line.contains(&url));
        ours.map(|(line, pid)| line + &read(pid.join("environ"))).collect()
    }
}

#[test]
fn a_disk_is_backed_up_to_a_bucket_and_the_key_is_seen_nowhere() {
    let bed = Bed::new();
    let daemon = &bed.daemon;
    let (status, target) = bed.add(&format!("{TARGET}/"));
    assert_eq!((status, &target["path"]), (201, &json!(TARGET)), "{target}");
    let target = target["uuid"].as_str().unwrap().to_owned();
    let sr = daemon.repository("disks");
    let made = daemon.done(daemon.post("/vdis", json!({ "sr": sr, "name": "web", "size": 16 << 20 })));
    let vdi = made["uuid"].as_str().unwrap().to_owned();
    let guest = vbd(daemon, &vdi, "nbd");
    plug(daemon, &guest);
    assert!(io(&nbd(daemon, &guest), &["write -P 7 1M 1M", "flush"]).0);
    let back_up = || daemon.post(&format!("/vdis/{vdi}/backup"), json!({ "target": target }));
    let made = daemon.done(back_up());
    unplug(daemon, &guest);
    let asked = json!({ "backup": made["backup"], "sr": sr, "name": "restored" });
    let restored = daemon.done(daemon.post(&format!("/backup-targets/{target}/restore"), asked));
    let reader = vbd(daemon, restored["uuid"].as_str().unwrap(), "nbd");
    plug(daemon, &reader);
    let (right, said) = io(&nbd(daemon, &reader), &["read -P 0 0 1M", "read -P 7 1M 1M", "read -P 0 2M 14M"]);
    assert!(right && !said.contains("failed"), "{said}");
    unplug(daemon, &reader);

    // While a process waits for the server.
    bed.bucket.set(Fault::Mute);
    plug(daemon, &guest);
    assert!(io(&nbd(daemon, &guest), &["write -P 8 3M 1M", "flush"]).0);
    let (status, task) = back_up();
    assert_eq!(status, 202, "{task}");
    wait_until("a process sends", || bed.processes().iter().any(|line| line.contains("TAPLINE_PROPERTIES")));
    assert!(bed.processes().iter().all(|line| !line.contains(SECRET)), "{:?}", bed.processes());
    assert_eq!(daemon.post(&format!("/tasks/{}/cancel", task["uuid"].as_str().unwrap()), json!({})).0, 200);
    assert_eq!(daemon.wait(&task)["state"], "cancelled");
    let catalogue = daemon.catalogue().path().unwrap().to_owned();
    let texts = [fs::read(&catalogue).unwrap(), fs::read(format!("{catalogue}-wal")).unwrap_or_default()];
    let shown = [daemon.log(), daemon.get("/backup-targets").1.to_string(), daemon.get("/tasks").1.to_string()];
    let all = texts.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).chain(shown);
    assert!(all.into_iter().all(|text| !text.contains(SECRET)));
}

#[test]
fn a_target_in_a_bucket_is_refused_unless_it_can_be_opened() {
    let bed = Bed::new();
    let refused = |path: &str, status: u16, with: &str| {
        let (got, problem) = bed.add(path);
        let text = problem.to_string();
        assert!(got == status && text.contains(with) && !text.contains(SECRET), "{got} {problem}");
    };
    bed.write_key("key", 0o640);
    refused(TARGET, 409, "mode 640");
    bed.write_key("another", 0o600);
    refused(TARGET, 409, "the server refuses access");
    bed.write_key("key", 0o600);
    refused("s3://elsewhere/x", 409, "the server has no such bucket");
    refused("s3://bucket/other", 404, "tapline backup target create s3://bucket/other");
    refused("/mnt", 400, "is a directory");
    refused("ftp://bucket", 400, "neither a directory nor");
    let (status, problem) = bed.daemon.post("/backup-targets", json!({ "name": "cloud", "path": TARGET }));
    assert_eq!((status, &problem["field"]), (400, &json!("s3")), "{problem}");
    fs::remove_file(bed.daemon.room().join("credentials")).unwrap();
    refused(TARGET, 409, "cannot read the credentials");
    assert_eq!(bed.daemon.get("/backup-targets").1, json!([]));
    // One that is registered is refused at each use when others can read its key.
    bed.write_key("key", 0o600);
    let target = bed.add(TARGET).1["uuid"].as_str().unwrap().to_owned();
    let list = || bed.daemon.get(&format!("/backup-targets/{target}/backups"));
    assert_eq!(list(), (200, json!([])));
    bed.write_key("key", 0o644);
    let (status, problem) = list();
    assert!(status == 409 && problem["detail"].as_str().unwrap().contains("mode 644"), "{problem}");
}
