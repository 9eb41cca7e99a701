//! Users and groups of this host, and the uids of its containers: none of them may be in a range of ours.
//!
//! It knows nothing about processes. Two sources are read: the name service (`getent`, for users and groups) and the
//! tables of subordinate ids (subuid(5), subgid(5)), which rootless containers use. Limit: a directory such as LDAP
//! that does not list its users is only queried for some uids of the range.

use std::fs;
use std::path::Path;

use api::{Code, Problem};

use super::{Range, entries};

/// Number of uids of a range that are looked up one by one, for directories that do not list their users. They are
/// spread evenly, so that a directory with more users in a range of 16,000 than 250 in a row is found.
const PROBES: u32 = 64;

/// The tables of subordinate ids, and the word for what they contain.
const SUBORDINATE: [(&str, &str); 2] = [("/etc/subuid", "uids"), ("/etc/subgid", "gids")];

/// Refuses a range that contains a user or group of this host, or ids that a user's containers may use. A name service
/// that does not answer is only logged: disks must start without it.
pub fn refuse_existing(setting: &str, range: Range) -> Result<(), Problem> {
    let named = [("user", "passwd"), ("group", "group")].into_iter().find_map(|(kind, database)| {
        let listed = entries(database, &[]).and_then(|all| Ok(all + &entries(database, &range.spread(PROBES))?));
        let listed = listed.unwrap_or_else(|problem| {
            tracing::warn!("{setting}: not checked against the {kind}s of this host: {problem}");
            String::new()
        });
        named_in(&listed, range).map(|(name, id)| format!("the {kind} {name} ({id})"))
    });
    let subordinate = || {
        SUBORDINATE.into_iter().find_map(|(table, ids)| {
            let text = fs::read_to_string(Path::new(table)).unwrap_or_default();
            let (owner, first, last) = subordinate_in(&text, range)?;
            Some(format!("{ids} {first}-{last}, which {table} reserves for containers of {owner}"))
        })
    };
    let Some(found) = named.or_else(subordinate) else { return Ok(()) };
    let what = format!("{setting}: the range {range} contains {found}");
    Err(Problem::new(Code::Invalid, what)
        .advise("set a range of unused uids in taplined.toml; 'getent passwd' and /etc/subuid list those in use"))
}

/// The first entry of passwd(5) or group(5) whose id is in the range.
fn named_in(text: &str, range: Range) -> Option<(&str, u32)> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let id = fields.nth(1)?.parse().ok()?;
        range.has(id).then_some((name, id))
    })
}

/// The first line of subuid(5) whose ids meet the range: the owner, the first and the last id.
fn subordinate_in(text: &str, range: Range) -> Option<(&str, u64, u64)> {
    text.lines().find_map(|line| {
        let mut fields = line.trim().split(':');
        let (owner, first) = (fields.next()?, fields.next()?.parse::<u64>().ok()?);
        let count = fields.next()?.parse::<u64>().ok()?;
        let last = first.saturating_add(count).checked_sub(1)?;
        (count > 0 && range.meets_ids(first, last)).then_some((owner, first, last))
    })
}

#[cfg(test)]
mod test {
    use super::*;

    fn range() -> Range {
        Range::parse("66000-81999").unwrap()
    }

    #[test]
    fn a_user_in_the_range_is_found_by_its_uid() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nweb:x:66000:100::/:/bin/false\n";
        assert_eq!(named_in(passwd, range()), Some(("web", 66_000)));
        assert_eq!(named_in("last:*:81999:\n", range()), Some(("last", 81_999)));
        assert_eq!(named_in("below:*:65999:66001:\nabove:*:82000:\n+::::::\n", range()), None);
    }

    #[test]
    fn subordinate_ids_that_meet_the_range_are_found() {
        let text = "# comment\nann:100000:65536\nbob:65536:65536\n";
        assert_eq!(subordinate_in(text, range()), Some(("bob", 65_536, 131_071)));
        assert_eq!(subordinate_in("ann:100000:65536\nnone:70000:0\ncut:70000\nx:y:z\n", range()), None);
        assert_eq!(subordinate_in("ann:81999:1\n", range()), Some(("ann", 81_999, 81_999)));
        assert_eq!(subordinate_in("ann:60000:6000\n", range()), None);
    }

    #[test]
    fn a_range_with_a_user_of_this_host_is_refused_by_name() {
        let listed = entries("passwd", &[]).unwrap();
        let line = listed.lines().find(|line| line.starts_with("nobody:")).unwrap();
        let uid: u32 = line.split(':').nth(2).unwrap().parse().unwrap();
        let refused = refuse_existing("disk-user-range", Range::of(uid, uid)).unwrap_err();
        assert!(refused.detail.contains(&format!("contains the user nobody ({uid})")), "{refused:?}");
    }
}
