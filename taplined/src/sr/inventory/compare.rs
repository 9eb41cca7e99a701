//! Compares a repository's inventory with the catalogue: a pure function.

use std::collections::{BTreeMap, BTreeSet};

use api::{Code, InventoryVdi, Problem, Sr, SrBelieve};
use repo::catalogue::Recorded;
use repo::inventory::{Contents, Log, Read};
use uuid::Uuid;

/// Maximum number of VDIs named per difference in a message.
const NAMED: usize = 3;

/// The action to take.
#[derive(Debug)]
pub enum Verdict {
    /// None: there is no inventory, and none can be written.
    Nothing,
    /// There is none yet: it is written from the catalogue.
    Begin,
    /// The file has the catalogue's state, or an earlier one from before the lines that the catalogue still keeps.
    Known(Box<Log>),
    /// The catalogue is older, or does not contain the repository: it is updated from the file.
    TakeIn(Box<Log>, Contents),
    /// The file is unusable, and the catalogue has all of its contents: it is renamed and rewritten.
    Rewrite,
}

/// Decides the action. `elsewhere`: another host has used the repository since; `fixed`: it is read-only.
pub fn compare(
    sr: &Sr,
    read: Read,
    recorded: Option<&Recorded>,
    believe: Option<SrBelieve>,
    elsewhere: bool,
    fixed: bool,
) -> Result<Verdict, Problem> {
    let (log, contents) = match (read, recorded) {
        (Read::Absent, _) if fixed => return Ok(Verdict::Nothing),
        (Read::Absent, _) => return Ok(Verdict::Begin),
        (Read::Whole(log, contents), Some(recorded)) => match place(&log, recorded) {
            Relation::Behind if !elsewhere || believe == Some(SrBelieve::Catalogue) => return Ok(Verdict::Known(log)),
            Relation::Behind => (log, contents),
            Relation::Ahead => (log, contents),
            Relation::Diverged => match believe {
                Some(SrBelieve::Repository) => (log, contents),
                Some(SrBelieve::Catalogue) if !fixed => return Ok(Verdict::Rewrite),
                _ => return Err(diverged(sr, &log, &contents, recorded)),
            },
        },
        (Read::Whole(log, contents), None) => (log, contents),
        (Read::Damaged(damage), Some(recorded)) if !fixed => {
            let known = damage.is_known(recorded.generation, &recorded.heads());
            if known || believe == Some(SrBelieve::Catalogue) {
                tracing::error!(sr = %sr.uuid, name = %sr.name, "rewriting its inventory: {}", damage.why);
                return Ok(Verdict::Rewrite);
            }
            let advice = damage.why.advice.clone().unwrap_or_default();
            let advice = format!("{advice}; or rewrite it from this host's catalogue: {}", attach("catalogue"));
            return Err(damage.why.advise(advice));
        }
        (Read::Damaged(damage), _) => return Err(damage.why),
    };
    Ok(Verdict::TakeIn(log, *contents))
}

/// How the file relates to the catalogue.
enum Relation {
    Behind,
    Ahead,
    Diverged,
}

fn place(log: &Log, recorded: &Recorded) -> Relation {
    let is_at = |(generation, head): &(u64, String)| *generation == log.generation && *head == log.head;
    if recorded.heads().iter().any(is_at) {
        Relation::Behind
    } else if log.has_been_at(recorded.generation, &recorded.head) {
        Relation::Ahead
    } else {
        Relation::Diverged
    }
}

fn attach(side: &str) -> String {
    format!("'tapline sr attach --believe {side}'")
}

/// The problem of two states without common history: a backup of the repository or of the state directory was
/// restored, or two hosts have used it.
fn diverged(sr: &Sr, log: &Log, contents: &Contents, recorded: &Recorded) -> Problem {
    let what = format!(
        "the repository '{}' ({}) and this host's catalogue have diverged: it is at generation {}, the catalogue at \
         {}, and neither is an ancestor of the other. {}",
        sr.name,
        sr.uuid,
        log.generation,
        recorded.generation,
        difference(&contents.vdis, &recorded.contents.vdis),
    );
    Problem::new(Code::State, what).advise(format!(
        "a backup of one of them was restored, or another host has used the repository. If the repository is right, \
         {}; if this host's catalogue is right and its files exist, {}. Nothing has been changed",
        attach("repository"),
        attach("catalogue"),
    ))
}

/// Describes how the VDIs of both differ.
fn difference(there: &BTreeMap<Uuid, InventoryVdi>, here: &BTreeMap<Uuid, InventoryVdi>) -> String {
    let only = |one: &BTreeMap<Uuid, InventoryVdi>, other: &BTreeMap<Uuid, InventoryVdi>| -> BTreeSet<Uuid> {
        one.keys().filter(|uuid| !other.contains_key(*uuid)).copied().collect()
    };
    let differ = |uuid: &&Uuid| here.get(*uuid).is_some_and(|known| there.get(*uuid).is_some_and(|said| said != known));
    let parts = [
        ("Only in the repository", only(there, here)),
        ("Only in the catalogue", only(here, there)),
        ("In both, but different", there.keys().filter(differ).copied().collect()),
    ];
    let name = |uuid: &Uuid| {
        there.get(uuid).or_else(|| here.get(uuid)).map_or_else(String::new, |vdi| format!("'{}' ({uuid})", vdi.name))
    };
    let named_parts: Vec<String> = parts
        .iter()
        .filter(|(_, vdis)| !vdis.is_empty())
        .map(|(what, vdis)| {
            let more = if vdis.len() > NAMED {
                format!(" and {} more", vdis.len().saturating_sub(NAMED))
            } else {
                String::new()
            };
            let named: Vec<String> = vdis.iter().take(NAMED).map(name).collect();
            format!("{what}: {}{more}.", named.join(", "))
        })
        .collect();
    if named_parts.is_empty() { "Their VDIs are the same.".into() } else { named_parts.join(" ") }
}
