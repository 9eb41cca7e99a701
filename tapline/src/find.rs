//! Finds the object that a name or a UUID prefix refers to.
//!
//! A full UUID is used as it is. Anything else must match exactly one object; the first match is never used silently.

use api::{Code, Problem, Sr, SrSource, SrState};
use uuid::Uuid;

use crate::session::Session;

/// How many candidates are listed; a longer list would not be read.
const LISTED: usize = 10;
/// The shortest UUID prefix that is accepted.
const DIGITS_MIN: usize = 4;

impl Session {
    /// Finds a repository.
    pub async fn sr(&self, text: &str) -> Result<Uuid, Problem> {
        match Uuid::parse_str(text) {
            Ok(uuid) => Ok(uuid),
            Err(_) => {
                let found = self.client.srs(Some(text)).await?;
                only("sr", text, found.iter().map(|sr| (sr.uuid, sr.name.as_str())))
            }
        }
    }

    /// Finds a disk.
    pub async fn vdi(&self, text: &str) -> Result<Uuid, Problem> {
        match Uuid::parse_str(text) {
            Ok(uuid) => Ok(uuid),
            Err(_) => {
                let found = self.client.vdis(None, Some(text)).await?;
                only("vdi", text, found.iter().map(|vdi| (vdi.uuid, vdi.name.as_str())))
            }
        }
    }

    /// The repository with this name or UUID; if none is given, the only one in which disks can be made.
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

    /// Finds a block device: by its UUID, as `VM/vda`, or by the name of a disk that only one has.
    pub async fn vbd(&self, text: &str) -> Result<Uuid, Problem> {
        if let Ok(uuid) = Uuid::parse_str(text) {
            return Ok(uuid);
        }
        if let Some((vm, device)) = text.rsplit_once('/') {
            return self.vbd_of(vm, device).await;
        }
        let by_uuid = self.client.vbds(None, None, Some(text)).await?;
        if !by_uuid.is_empty() {
            return only("vbd", text, by_uuid.iter().map(|vbd| (vbd.uuid, "")));
        }
        let mut of_disks = Vec::new();
        for vdi in self.client.vdis(None, Some(text)).await? {
            of_disks.extend(self.client.vbds(None, Some(vdi.uuid), None).await?);
        }
        only("vbd", text, of_disks.iter().map(|vbd| (vbd.uuid, "")))
    }

    /// The block device of a machine that its guest calls `vda`, or that has this position.
    async fn vbd_of(&self, vm: &str, device: &str) -> Result<Uuid, Problem> {
        let position = position(device).ok_or_else(|| {
            Problem::new(Code::Invalid, format!("'{device}' is no disk of a machine"))
                .advise("use VM/vda, VM/xvda, or VM/0 for the first one")
        })?;
        let uuid = self.vm(vm).await?;
        let vbds = self.client.vbds(Some(uuid), None, None).await?;
        let found = vbds.iter().find(|vbd| u32::from(vbd.position) == position).map(|vbd| vbd.uuid);
        found.ok_or_else(|| {
            Problem::new(Code::NotFound, format!("the vm '{vm}' has no disk {device}"))
                .advise(format!("'tapline vbd list --vm {vm}' shows its disks"))
        })
    }

    /// Finds a machine.
    pub async fn vm(&self, text: &str) -> Result<Uuid, Problem> {
        match Uuid::parse_str(text) {
            Ok(uuid) => Ok(uuid),
            Err(_) => {
                let found = self.client.vms(Some(text)).await?;
                only("vm", text, found.iter().map(|vm| (vm.uuid, vm.name.as_str())))
            }
        }
    }

    /// Finds a repository, if one is named.
    pub async fn sr_if(&self, text: Option<&str>) -> Result<Option<Uuid>, Problem> {
        if let Some(text) = text { self.sr(text).await.map(Some) } else { Ok(None) }
    }

    /// Finds a disk, if one is named.
    pub async fn vdi_if(&self, text: Option<&str>) -> Result<Option<Uuid>, Problem> {
        if let Some(text) = text { self.vdi(text).await.map(Some) } else { Ok(None) }
    }

    /// Finds a machine, if one is named.
    pub async fn vm_if(&self, text: Option<&str>) -> Result<Option<Uuid>, Problem> {
        if let Some(text) = text { self.vm(text).await.map(Some) } else { Ok(None) }
    }

    /// Finds a token.
    pub async fn token(&self, text: &str) -> Result<Uuid, Problem> {
        match Uuid::parse_str(text) {
            Ok(uuid) => Ok(uuid),
            Err(_) => {
                let all = self.client.tokens().await?;
                let found = all.iter().filter(|token| token.name.as_str() == text || begins(token.uuid, text));
                only("token", text, found.map(|token| (token.uuid, token.name.as_str())))
            }
        }
    }

    /// Finds a task by its UUID prefix; its verb is not unique.
    pub async fn task(&self, text: &str) -> Result<Uuid, Problem> {
        match Uuid::parse_str(text) {
            Ok(uuid) => Ok(uuid),
            Err(_) => {
                let all = self.client.tasks(false).await?;
                let found = all.iter().filter(|task| begins(task.uuid, text));
                only("task", text, found.map(|task| (task.uuid, task.verb.as_str())))
            }
        }
    }
}

/// The position of `vda`, `xvdb`, `sdc`, or of a number.
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

/// The only match, or an error that lists the candidates.
fn only<'a>(noun: &str, text: &str, found: impl Iterator<Item = (Uuid, &'a str)>) -> Result<Uuid, Problem> {
    let found: Vec<(Uuid, &str)> = found.collect();
    match found.as_slice() {
        [(uuid, _)] => Ok(*uuid),
        [] => Err(Problem::new(Code::NotFound, format!("no {noun} named '{text}'")).advise(format!(
            "give a name or at least {DIGITS_MIN} digits of a UUID; 'tapline {noun} list' shows both"
        ))),
        many => {
            let message = format!("'{text}' is ambiguous; it matches {} {noun}s:{}", many.len(), listed(many));
            Err(Problem::new(Code::Invalid, message).advise("give the UUID of the one you mean"))
        }
    }
}

fn listed(found: &[(Uuid, &str)]) -> String {
    let first = found.iter().take(LISTED).map(|(uuid, name)| format!("\n    {uuid}  {name}"));
    let first: String = first.map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().concat();
    let more = found.len().saturating_sub(LISTED);
    if more > 0 { format!("{first}\n    and {more} more") } else { first }
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

    #[test]
    fn a_unique_match_is_found() {
        let uuid = Uuid::from_u128(7);
        assert_eq!(only("sr", "a", [(uuid, "a")].into_iter()), Ok(uuid));
    }

    #[test]
    fn an_ambiguous_match_is_refused_with_all_candidates() {
        let problem = only("sr", "a", (1..=2).map(|n| (Uuid::from_u128(n), "a"))).unwrap_err();
        let text = "'a' is ambiguous; it matches 2 srs:\n    00000000-0000-0000-0000-000000000001  a\n    \
                    00000000-0000-0000-0000-000000000002  a";
        assert_eq!(problem.detail, text);
        let many = only("vbd", "0000", (1..=13).map(|n| (Uuid::from_u128(n), ""))).unwrap_err();
        assert!(many.detail.ends_with("00000000000a\n    and 3 more"), "{}", many.detail);
    }

    #[test]
    fn no_match_is_refused_with_advice() {
        let problem = only("vm", "x", std::iter::empty()).unwrap_err();
        assert_eq!(problem.code, Code::NotFound);
        assert!(problem.advice.unwrap().contains("tapline vm list"));
    }
}
