//! Finds the object that a name or a UUID prefix refers to.
//!
//! A full UUID is used as it is. Anything else must match exactly one object; the first match is never used silently.

use api::{Code, Problem};
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

    /// Finds a block device. Block devices have no names.
    pub async fn vbd(&self, text: &str) -> Result<Uuid, Problem> {
        match Uuid::parse_str(text) {
            Ok(uuid) => Ok(uuid),
            Err(_) => {
                let found = self.client.vbds(None, None, Some(text)).await?;
                only("vbd", text, found.iter().map(|vbd| (vbd.uuid, "")))
            }
        }
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
