//! Finds the object that a name or UUID prefix refers to.
//!
//! A full UUID is used unchecked. Anything else must match exactly one object, or is refused with the candidates. If a
//! disk and snapshots have the same name, it refers to the disk.

use std::collections::HashMap;

use api::{Code, ObjectKind, Problem, Sr, SrSource, SrState, Vdi, Vm};
use control::size::readable;
use uuid::Uuid;

use crate::column::{Column, Layout, Uuids, table};
use crate::session::Session;

/// Maximum number of candidates that are listed.
const LISTED: usize = 10;
/// The shortest UUID prefix that is accepted.
const DIGITS_MIN: usize = 4;

/// A disk, as named on the command line.
#[derive(Clone, Debug, clap::Args)]
pub struct Disk {
    /// Name or UUID prefix
    vdi: String,
    /// The repository in which the disk is: its name or UUID prefix [default: any]
    #[arg(long)]
    sr: Option<String>,
}

impl Disk {
    /// Finds the disk; returns its UUID.
    pub async fn find(&self, session: &Session) -> Result<Uuid, Problem> {
        let sr = session.sr_if(self.sr.as_deref()).await?;
        session.vdi_in(sr, &self.vdi).await
    }
}

type Candidate<T> = Column<T>;

const SRS: &[Candidate<Sr>] = &[
    Candidate::new("name", |sr, _| sr.name.to_string()),
    Candidate::new("location", |sr, _| crate::sr::location(&sr.source)),
    Candidate::new("created", |sr, _| format!("{:.0}", sr.created)),
    Candidate::new("uuid", |sr, uuids| uuids.show(sr.uuid)),
];

const VMS: &[Candidate<Vm>] = &[
    Candidate::new("name", |vm, _| vm.name.to_string()),
    Candidate::new("created", |vm, _| format!("{:.0}", vm.created)),
    Candidate::new("uuid", |vm, uuids| uuids.show(vm.uuid)),
];

/// A candidate for an ambiguous disk name.
struct DiskCandidate {
    vdi: Vdi,
    sr: Option<Sr>,
}

const VDIS: &[Candidate<DiskCandidate>] = &[
    Candidate::new("kind", |found, _| kind(&found.vdi, found.sr.as_ref()).into()),
    Candidate::new("name", |found, _| found.vdi.name.to_string()),
    Candidate::new("sr", |found, _| {
        found.sr.as_ref().map_or_else(|| Uuids::SHORT.show(found.vdi.sr), |sr| sr.name.to_string())
    }),
    Candidate::new("virtual", |found: &DiskCandidate, _| readable(found.vdi.size)).right(),
    Candidate::new("created", |found, _| format!("{:.0}", found.vdi.created)),
    Candidate::new("uuid", |found, uuids| uuids.show(found.vdi.uuid)),
];

/// The word for a VDI in messages.
fn kind(vdi: &Vdi, sr: Option<&Sr>) -> &'static str {
    match sr.map(|sr| &sr.source) {
        Some(SrSource::Iso { .. }) => "ISO",
        _ if vdi.snapshot_of.is_some() => "snapshot",
        _ => "disk",
    }
}

impl Session {
    /// Finds a repository.
    pub async fn sr(&self, text: &str) -> Result<Uuid, Problem> {
        if let Ok(uuid) = Uuid::parse_str(text) {
            return Ok(uuid);
        }
        match self.client.srs(Some(text)).await?.as_slice() {
            [] => Err(no_match("sr", text)),
            [sr] => Ok(self.remember_name(ObjectKind::Sr, "repository", sr.uuid, sr.name.as_str())),
            several => Err(ambiguous("repositories", text, &candidates(several, SRS)?, several.len(), UUID)),
        }
    }

    /// Finds a disk in any repository.
    pub async fn vdi(&self, text: &str) -> Result<Uuid, Problem> {
        self.vdi_in(None, text).await
    }

    /// Finds a disk, in a repository if one is given.
    pub async fn vdi_in(&self, sr: Option<Uuid>, text: &str) -> Result<Uuid, Problem> {
        if let Ok(uuid) = Uuid::parse_str(text) {
            return Ok(uuid);
        }
        let found = self.client.vdis(sr, Some(text)).await?;
        self.only_vdi(text, &found).await
    }

    /// Finds a snapshot of a disk; if none has this name, any disk.
    pub async fn snapshot_of(&self, vdi: Uuid, text: &str) -> Result<Uuid, Problem> {
        if let Ok(uuid) = Uuid::parse_str(text) {
            return Ok(uuid);
        }
        let mut found = self.client.vdis(None, Some(text)).await?;
        if found.iter().any(|one| one.snapshot_of == Some(vdi)) {
            found.retain(|one| one.snapshot_of == Some(vdi));
        }
        self.only_vdi(text, &found).await
    }

    async fn only_vdi(&self, text: &str, found: &[Vdi]) -> Result<Uuid, Problem> {
        if let Some(vdi) = single_disk(text, found) {
            return Ok(self.remember_name(ObjectKind::Vdi, kind(vdi, None), vdi.uuid, vdi.name.as_str()));
        }
        if found.is_empty() {
            return Err(no_match("vdi", text));
        }
        let srs: HashMap<Uuid, Sr> = self.client.srs(None).await?.into_iter().map(|sr| (sr.uuid, sr)).collect();
        let of = |vdi: &Vdi| DiskCandidate { vdi: vdi.clone(), sr: srs.get(&vdi.sr).cloned() };
        let rows: Vec<DiskCandidate> = found.iter().map(of).collect();
        let first = found.first().map(|vdi| vdi.sr);
        let advice = if found.iter().all(|vdi| Some(vdi.sr) == first) {
            UUID
        } else {
            "give the UUID of the one you mean, or its repository: --sr"
        };
        Err(ambiguous("disks", text, &candidates(&rows, VDIS)?, found.len(), advice))
    }

    /// Finds a repository; without a name, the only one that accepts new disks.
    pub async fn sr_or_only(&self, text: Option<&str>) -> Result<Uuid, Problem> {
        if let Some(text) = text {
            return self.sr(text).await;
        }
        let srs = self.client.srs(None).await?;
        let iso = |sr: &Sr| matches!(sr.source, SrSource::Iso { .. });
        let usable: Vec<&Sr> = srs.iter().filter(|sr| sr.state == SrState::Attached && !iso(sr)).collect();
        match usable.as_slice() {
            [sr] => Ok(sr.uuid),
            [] => Err(Problem::new(Code::NotFound, "there is no attached repository for the disk")
                .advise("make one: tapline sr create NAME --dir DIRECTORY")),
            several => {
                let names: Vec<String> = several.iter().map(|sr| sr.name.to_string()).collect();
                let what = format!("which repository the disk goes to is not clear: there are {}", names.join(", "));
                Err(Problem::new(Code::Invalid, what).advise("give one with --sr"))
            }
        }
    }

    /// Finds a block device by its UUID, as `VM/vda`, or by the name of a disk that has only one.
    pub async fn vbd(&self, text: &str) -> Result<Uuid, Problem> {
        if let Ok(uuid) = Uuid::parse_str(text) {
            return Ok(uuid);
        }
        if let Some((vm, device)) = text.rsplit_once('/') {
            return self.vbd_of(vm, device).await;
        }
        let by_uuid = self.client.vbds(None, None, Some(text)).await?;
        if !by_uuid.is_empty() {
            return self.only_vbd(text, &by_uuid);
        }
        let mut of_disks = Vec::new();
        let vdis = self.client.vdis(None, Some(text)).await?;
        for vdi in &vdis {
            of_disks.extend(self.client.vbds(None, Some(vdi.uuid), None).await?);
        }
        if of_disks.is_empty() && !vdis.is_empty() {
            return Err(Problem::new(Code::NotFound, format!("the disk '{text}' has no block device"))
                .advise(format!("'tapline vdi attach {text}' makes one and plugs it")));
        }
        self.only_vbd(text, &of_disks)
    }

    fn only_vbd(&self, text: &str, found: &[api::Vbd]) -> Result<Uuid, Problem> {
        let uuid = single_match("vbd", text, found.iter().map(|vbd| (vbd.uuid, "")))?;
        Ok(self.remember_name(ObjectKind::Vbd, "VBD", uuid, text))
    }

    /// Finds a machine's block device by its name in the guest (`vda`) or its position.
    async fn vbd_of(&self, vm: &str, device: &str) -> Result<Uuid, Problem> {
        let position = position(device).ok_or_else(|| {
            Problem::new(Code::Invalid, format!("'{device}' is no disk of a machine"))
                .advise("use VM/vda, VM/xvda, or VM/0 for the first one")
        })?;
        let uuid = self.vm(vm).await?;
        let vbds = self.client.vbds(Some(uuid), None, None).await?;
        let found = vbds.iter().find(|vbd| u32::from(vbd.position) == position);
        let found = found.map(|vbd| self.remember_name(ObjectKind::Vbd, "VBD", vbd.uuid, &format!("{vm}/{device}")));
        found.ok_or_else(|| {
            Problem::new(Code::NotFound, format!("the vm '{vm}' has no disk {device}"))
                .advise(format!("'tapline vbd list --vm {vm}' shows its disks"))
        })
    }

    /// Finds a machine by its name or UUID prefix.
    pub async fn vm(&self, text: &str) -> Result<Uuid, Problem> {
        if let Ok(uuid) = Uuid::parse_str(text) {
            return Ok(uuid);
        }
        match self.client.vms(Some(text)).await?.as_slice() {
            [] => Err(no_match("vm", text)),
            [vm] => Ok(self.remember_name(ObjectKind::Vm, "VM", vm.uuid, vm.name.as_str())),
            several => Err(ambiguous("machines", text, &candidates(several, VMS)?, several.len(), UUID)),
        }
    }

    /// Finds a repository if one is given.
    pub async fn sr_if(&self, text: Option<&str>) -> Result<Option<Uuid>, Problem> {
        if let Some(text) = text { self.sr(text).await.map(Some) } else { Ok(None) }
    }

    /// Finds a disk if one is given.
    pub async fn vdi_if(&self, text: Option<&str>) -> Result<Option<Uuid>, Problem> {
        if let Some(text) = text { self.vdi(text).await.map(Some) } else { Ok(None) }
    }

    /// Finds a machine if one is given.
    pub async fn vm_if(&self, text: Option<&str>) -> Result<Option<Uuid>, Problem> {
        if let Some(text) = text { self.vm(text).await.map(Some) } else { Ok(None) }
    }

    /// Finds a token by its name or UUID prefix.
    pub async fn token(&self, text: &str) -> Result<Uuid, Problem> {
        match Uuid::parse_str(text) {
            Ok(uuid) => Ok(uuid),
            Err(_) => {
                let all = self.client.tokens().await?;
                let found = all.iter().filter(|token| token.name.as_str() == text || begins(token.uuid, text));
                single_match("token", text, found.map(|token| (token.uuid, token.name.as_str())))
            }
        }
    }

    /// Finds a backup target.
    pub async fn backup_target(&self, text: &str) -> Result<Uuid, Problem> {
        if let Ok(uuid) = Uuid::parse_str(text) {
            return Ok(uuid);
        }
        let found = self.client.backup_targets(Some(text)).await?;
        single_match("target", text, found.iter().map(|target| (target.uuid, target.name.as_str())))
    }

    /// Finds a task by its UUID prefix; verbs are not unique.
    pub async fn task(&self, text: &str) -> Result<Uuid, Problem> {
        match Uuid::parse_str(text) {
            Ok(uuid) => Ok(uuid),
            Err(_) => {
                let all = self.client.tasks(false).await?;
                let found = all.iter().filter(|task| begins(task.uuid, text));
                single_match("task", text, found.map(|task| (task.uuid, task.verb.as_str())))
            }
        }
    }
}

/// Parses `vda`, `xvdb`, `sdc` or a number into a position.
fn position(device: &str) -> Option<u32> {
    if let Ok(number) = device.parse() {
        return Some(number);
    }
    let letters = ["xvd", "vd", "sd", "hd"].iter().find_map(|kind| device.strip_prefix(kind))?;
    let is_letters = (1..=2).contains(&letters.len()) && letters.bytes().all(|byte| byte.is_ascii_lowercase());
    is_letters.then(|| letters.bytes().fold(0, |sum, byte| sum * 26 + u32::from(byte - b'a') + 1) - 1)
}

fn begins(uuid: Uuid, text: &str) -> bool {
    text.chars().filter(char::is_ascii_hexdigit).count() >= DIGITS_MIN
        && uuid.to_string().starts_with(&text.to_ascii_lowercase())
}

/// Advice if several objects match.
const UUID: &str = "give the UUID of the one you mean";

/// The disk that a name selects: the only match, or the only disk with that name among snapshots.
fn single_disk<'a>(text: &str, found: &'a [Vdi]) -> Option<&'a Vdi> {
    if let [only] = found {
        return Some(only);
    }
    let mut disks = found.iter().filter(|vdi| vdi.snapshot_of.is_none());
    let disk = disks.next().filter(|_| disks.next().is_none())?;
    found.iter().all(|vdi| vdi.name.as_str() == text).then_some(disk)
}

/// The only match, or an error that lists the candidates.
fn single_match<'a>(noun: &str, text: &str, found: impl Iterator<Item = (Uuid, &'a str)>) -> Result<Uuid, Problem> {
    let found: Vec<(Uuid, &str)> = found.collect();
    match found.as_slice() {
        [] => Err(no_match(noun, text)),
        [(uuid, _)] => Ok(*uuid),
        several => {
            let lines: String = several.iter().take(LISTED).map(|(uuid, name)| format!("{uuid}  {name}\n")).collect();
            Err(ambiguous(&format!("{noun}s"), text, &lines, several.len(), UUID))
        }
    }
}

fn no_match(noun: &str, text: &str) -> Problem {
    let digits = format!("at least {DIGITS_MIN} digits of");
    let (what, advice) = match noun {
        "task" => {
            ("no task has a UUID that begins with", format!("give {digits} it; 'tapline task list --all' shows it"))
        }
        "vbd" => {
            ("no block device is", format!("give VM/vda, a disk's name or {digits} a UUID; see 'tapline vbd list'"))
        }
        _ => return not_named(noun, text, &digits),
    };
    Problem::new(Code::NotFound, format!("{what} '{text}'")).advise(advice)
}

fn not_named(noun: &str, text: &str, digits: &str) -> Problem {
    Problem::new(Code::NotFound, format!("no {noun} named '{text}'"))
        .advise(format!("give a name or {digits} a UUID; 'tapline {noun} list' shows both"))
}

/// Formats the first candidates as a table.
fn candidates<T>(found: &[T], columns: &[Column<T>]) -> Result<String, Problem> {
    let listed = found.get(..LISTED).unwrap_or(found);
    table(listed, columns, &Layout { wide: true, ..Layout::default() })
}

/// An error that lists the candidates.
fn ambiguous(nouns: &str, text: &str, lines: &str, count: usize, advice: &str) -> Problem {
    let lines: String = lines.lines().map(|line| format!("\n    {line}").trim_end().to_owned()).collect();
    let more = count.saturating_sub(LISTED);
    let more = if more > 0 { format!("\n    and {more} more") } else { String::new() };
    let message = format!("'{text}' is ambiguous; it matches {count} {nouns}:{lines}{more}");
    Problem::new(Code::Invalid, message).advise(advice)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn devices_are_positions_as_guests_count_them() {
        let all = ["vda", "xvdb", "sdz", "vdaa", "vdba", "7"].map(position);
        assert_eq!(all, [0, 1, 25, 26, 52, 7].map(Some));
        assert!(["", "vd", "vdA", "nvme0n1", "vdaaa"].iter().all(|device| position(device).is_none()));
    }

    fn vdi(number: u128, name: &str, snapshot_of: Option<u128>) -> Vdi {
        let snapshot_of = snapshot_of.map(|of| Uuid::from_u128(of).to_string());
        let shown = serde_json::json!({
            "uuid": Uuid::from_u128(number), "name": name, "description": "", "tags": [], "other_config": {},
            "health": { "state": "healthy" }, "sr": Uuid::nil(), "size": 512,
            "physical_utilisation": 0, "format": "raw", "file": "a.raw", "depth": 1, "read_only": false,
            "snapshot_of": snapshot_of, "state": "ready", "users": [], "created": "2026-11-22T10:00:00Z",
        });
        serde_json::from_value(shown).unwrap()
    }

    #[test]
    fn a_name_shared_with_snapshots_selects_the_disk() {
        let (disk, other) = (vdi(1, "web", None), vdi(2, "web", None));
        let snapshot = |number| vdi(number, "web", Some(1));
        assert_eq!(single_disk("web", &[snapshot(3), disk.clone(), snapshot(4)]), Some(&disk));
        assert_eq!(single_disk("web", &[snapshot(3)]), Some(&snapshot(3)));
        assert_eq!(single_disk("web", &[disk.clone(), other, snapshot(3)]), None);
        assert_eq!(single_disk("web", &[snapshot(3), snapshot(4)]), None);
        // A snapshot is selected by its UUID, a disk by its name.
        assert_eq!(single_disk("abcd", &[vdi(1, "abcd", None), vdi(2, "web", Some(7))]), None);
    }

    #[test]
    fn an_ambiguous_match_is_refused_with_all_candidates() {
        let problem = single_match("task", "0000", (1..=2).map(|n| (Uuid::from_u128(n), "a"))).unwrap_err();
        let text = "'0000' is ambiguous; it matches 2 tasks:\n    00000000-0000-0000-0000-000000000001  a\n    \
                    00000000-0000-0000-0000-000000000002  a";
        assert_eq!(problem.detail, text);
        let many = single_match("vbd", "0000", (1..=13).map(|n| (Uuid::from_u128(n), ""))).unwrap_err();
        assert!(many.detail.ends_with("00000000000a\n    and 3 more"), "{}", many.detail);
    }

    #[test]
    fn no_match_is_refused_with_advice() {
        let problem = single_match("vm", "x", std::iter::empty()).unwrap_err();
        assert_eq!(problem.code, Code::NotFound);
        assert!(problem.advice.unwrap().contains("tapline vm list"));
    }
}
