//! Exclusive uids, one for each process that must be isolated from all others.
//!
//! The kernel only checks the number of a user: it needs no name and no entry anywhere. Invariant: a uid is given to
//! only one living process at a time. Which uids are in use is read from the processes themselves, so the next daemon
//! knows it too; a uid is reused as late as possible.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::{Code, Problem};
use repo::catalogue::Process;
use uuid::Uuid;

use super::User;
use super::existing::refuse_existing;
use crate::kernel;

/// Uids with a fixed meaning on every host: `nobody`, and −1 in 16 bits (systemd, "Users, Groups, UIDs and GIDs").
const RESERVED: std::ops::RangeInclusive<u32> = 65_534..=65_535;

/// An inclusive range of uids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    first: u32,
    last: u32,
}

impl Range {
    /// Parses a range: `66000-81999`.
    pub fn parse(text: &str) -> Result<Range, String> {
        let ends = text.split_once('-').and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
        let Some((first, last)) = ends else { return Err(format!("{text:?} is not a uid range such as 66000-81999")) };
        // `u32::MAX` means 'no user'.
        if first == 0 || last < first || last == u32::MAX {
            return Err(format!("{text:?} contains no usable uids"));
        }
        if first <= *RESERVED.end() && last >= *RESERVED.start() {
            return Err(format!("{text:?} contains the uid of the user 'nobody'"));
        }
        Ok(Range { first, last })
    }

    /// Whether the ranges overlap.
    pub fn meets(self, other: Range) -> bool {
        self.first <= other.last && other.first <= self.last
    }

    /// Whether the range contains a uid.
    pub fn has(self, number: u32) -> bool {
        (self.first..=self.last).contains(&number)
    }

    /// Whether the range overlaps with the ids from `first` to `last`.
    pub fn meets_ids(self, first: u64, last: u64) -> bool {
        first <= u64::from(self.last) && u64::from(self.first) <= last
    }

    /// At most `count` uids of the range, evenly spread, as text.
    pub fn spread(self, count: u32) -> Vec<String> {
        let step = ((self.last - self.first) / count.max(1)).saturating_add(1);
        (self.first..=self.last).step_by(step as usize).map(|id| id.to_string()).collect()
    }

    /// A range that may contain any uids.
    #[cfg(test)]
    pub fn of(first: u32, last: u32) -> Range {
        Range { first, last }
    }

    /// Whether the uid map of this process (user_namespaces(7)) contains the whole range: containers may have fewer
    /// uids.
    fn is_within(self, map: &str) -> bool {
        map.lines().any(|line| {
            let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            let &[inside, _, count] = numbers.as_slice() else { return false };
            inside <= u64::from(self.first) && u64::from(self.last) < inside.saturating_add(count)
        })
    }
}

impl std::fmt::Display for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// The uids of a range and the processes that run as them. Clones share their state.
#[derive(Clone, Debug)]
pub struct Numbers {
    /// The setting, for messages.
    setting: &'static str,
    range: Range,
    state: Arc<Mutex<UidsInUse>>,
}

#[derive(Debug)]
struct UidsInUse {
    next: u32,
    holders: HashMap<u32, Holder>,
}

#[derive(Clone, Copy, Debug)]
enum Holder {
    /// Chosen for a process that is about to be started.
    Chosen,
    Process(Process),
}

/// A uid reserved for a process that is about to be started; dropping it releases the uid.
#[derive(Debug)]
pub struct Chosen {
    numbers: Numbers,
    number: u32,
    given: bool,
}

/// Lower uids belong to the system and its services (login.defs(5), UID_MIN).
const SYSTEM_USERS: u32 = 1000;

impl Numbers {
    /// The uids of a setting, some of which running processes may already use.
    pub fn of(setting: &'static str, text: &str, instead: &str) -> Result<Numbers, Problem> {
        let range = Range::parse(text).map_err(|why| Problem::new(Code::Invalid, format!("{setting}: {why}")))?;
        if range.first < SYSTEM_USERS {
            let what = format!(
                "{setting}: uids below {SYSTEM_USERS} are reserved for the system, and {text} contains some of \
                    them"
            );
            return Err(Problem::new(Code::Invalid, what).advise("choose an unused range such as the default"));
        }
        // Without a map there are no user namespaces.
        if std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| !range.is_within(&map)) {
            let what = format!("{setting}: the uids {text} do not exist here; this container has a smaller range");
            return Err(Problem::new(Code::Invalid, what)
                .advise(format!("choose a range that exists, or set a single user: {instead} = \"nobody\"")));
        }
        refuse_existing(setting, range)?;
        let holders = running(range)?;
        // Each daemon starts at a random uid: two daemons of one host with the same range seldom collide.
        let count = u128::from(range.last - range.first) + 1;
        let next = u32::try_from(Uuid::new_v4().as_u128() % count).map_or(range.first, |at| range.first + at);
        Ok(Numbers { setting, range, state: Arc::new(Mutex::new(UidsInUse { next, holders })) })
    }

    /// The whole range.
    pub fn all(&self) -> std::ops::RangeInclusive<u32> {
        self.range.first..=self.range.last
    }

    /// Reserves a uid that no living process has. Fails if all are in use.
    pub fn choose(&self) -> Result<Chosen, Problem> {
        let mut state = self.state();
        for _ in self.range.first..=self.range.last {
            let number = state.next;
            state.next = if number == self.range.last { self.range.first } else { number + 1 };
            if !state.holders.get(&number).is_some_and(Holder::is_there) {
                state.holders.insert(number, Holder::Chosen);
                return Ok(Chosen { numbers: self.clone(), number, given: false });
            }
        }
        let what = format!("all uids of {} are in use", self.setting);
        Err(Problem::new(Code::InUse, what).advise(format!("set a larger {} and restart taplined", self.setting)))
    }

    fn state(&self) -> MutexGuard<'_, UidsInUse> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Holder {
    fn is_there(&self) -> bool {
        match self {
            Holder::Chosen => true,
            Holder::Process(known) => kernel::identity(known.pid) == Some(*known),
        }
    }
}

impl Chosen {
    /// The user, with a group of the same number.
    pub fn user(&self) -> User {
        (self.number, self.number)
    }

    /// The process has the uid from now on, until it exits.
    pub fn given_to(mut self, pid: u32) {
        self.given = true;
        let mut state = self.numbers.state();
        match kernel::identity(pid) {
            Some(process) => state.holders.insert(self.number, Holder::Process(process)),
            None => state.holders.remove(&self.number),
        };
    }
}

impl Drop for Chosen {
    fn drop(&mut self) {
        if !self.given {
            self.numbers.state().holders.remove(&self.number);
        }
    }
}

/// The processes of this host that run as users of the range, by uid.
fn running(range: Range) -> Result<HashMap<u32, Holder>, Problem> {
    let processes = std::fs::read_dir("/proc").map_err(|error| Problem::failed("find used uids in /proc", error))?;
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let found = pids.filter_map(|pid| {
        let number = user_of(pid).filter(|number| range.has(*number))?;
        Some((number, Holder::Process(kernel::identity(pid)?)))
    });
    Ok(found.collect())
}

/// The uid of a process. Read from its status: its directory in /proc is owned by root where the process is not
/// dumpable.
pub fn user_of(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod test {
    use super::*;

    fn three() -> Numbers {
        Numbers::of("disk-user-range", "66000-66002", "disk-user").unwrap()
    }

    #[test]
    fn only_a_range_of_unused_uids_is_accepted() {
        let range = |text| Range::parse(text).unwrap();
        assert_eq!(range("66000-81999"), Range { first: 66_000, last: 81_999 });
        assert!(range("66000-66009").meets(range("66009-66010")) && range("66000-66009").meets(range("66004-66004")));
        assert_eq!(range("66000-66009").spread(3), ["66000", "66004", "66008"]);
        assert_eq!(range("66000-66001").spread(64), ["66000", "66001"]);
        assert!(!range("66000-66009").meets(range("66010-66019")) && !range("66010-66019").meets(range("66000-66009")));
        for bad in ["", "66000", "a-b", "66000-", "0-10", "7-6", "60000-70000", "65535-65536", "1-4294967295", "-5--1"]
        {
            assert!(Range::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_container_may_have_fewer_uids() {
        let range = Range::parse("66000-81999").unwrap();
        assert!(range.is_within("         0          0 4294967295\n"));
        assert!(!range.is_within("         0     100000      65536\n"));
        assert!(!range.is_within("0 100000 70000\n70000 170000 70000\n"));
        assert!(range.is_within("0 100000 1000\n1000 200000 81000\n"));
    }

    #[test]
    fn uids_are_exclusive_and_reused_as_late_as_possible() {
        let numbers = three();
        let (first, second) = (numbers.choose().unwrap(), numbers.choose().unwrap());
        let third = numbers.choose().unwrap();
        let mut all = [&first, &second, &third].map(|chosen| chosen.user().0);
        all.sort_unstable();
        assert_eq!(all, [66_000, 66_001, 66_002]);
        assert_eq!(numbers.choose().unwrap_err().code, Code::InUse);
        let free = second.user();
        drop(second);
        assert_eq!(numbers.choose().unwrap().user(), free);
    }

    #[test]
    fn a_uid_is_reserved_until_its_process_exits() {
        let numbers = Numbers { range: Range { first: 66_000, last: 66_000 }, ..three() };
        numbers.state().next = 66_000;
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        numbers.choose().unwrap().given_to(child.id());
        assert!(numbers.choose().is_err());
        child.kill().unwrap();
        child.wait().unwrap();
        numbers.choose().unwrap();
    }

    #[test]
    fn uids_of_running_processes_are_known() {
        let own = rustix::process::getuid().as_raw();
        assert_eq!(user_of(std::process::id()), Some(own));
        assert!(running(Range { first: own, last: own }).unwrap().contains_key(&own));
    }
}
