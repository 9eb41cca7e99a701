//! Determines the parents of new images: each must be based on the parent that it records, if that is here and
//! matches. A pure function.
//!
//! Invariant: a placed image has a placed or known parent, down to one without a parent; an image that could show
//! wrong data to a guest is unplaced.

use std::collections::{HashMap, HashSet};

use api::{Code, ImageFormat, Problem, Unplaced};
use uuid::Uuid;

use super::listing::{Candidate, unplaced};

/// An image, according to its own metadata.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The file.
    pub file: Candidate,
    /// Virtual size in bytes.
    pub size: u64,
    /// The identity recorded by its children.
    pub identity: Option<Uuid>,
    /// XenServer's storage manager considers it an inner node of a chain.
    pub hidden: bool,
    /// Its recorded parent.
    pub parent: Option<Recorded>,
}

/// What an image records about its parent.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    /// The parent's identity.
    pub identity: Option<Uuid>,
    /// The parent's file name, if it is in this repository.
    pub file: Option<String>,
    /// The parent's format.
    pub format: Option<ImageFormat>,
    /// The record as text, for messages.
    pub shown: String,
}

/// An image and its position.
#[derive(Clone, Debug, PartialEq)]
pub struct Placing {
    /// The image.
    pub found: Found,
    /// The file of its parent image.
    pub parent: Option<String>,
    /// Whether it has children.
    pub below_others: bool,
}

/// Placed images, parents before their children, and unplaced ones.
#[derive(Clone, Debug, Default)]
pub struct Placement {
    /// Images that were placed.
    pub placed: Vec<Placing>,
    /// Images that were not, with the reasons.
    pub unplaced: Vec<Unplaced>,
}

impl Found {
    /// A known image, whose metadata is not needed.
    pub fn of_known(file: Candidate) -> Found {
        Found { size: file.len, file, identity: None, hidden: false, parent: None }
    }

    fn is_known(&self) -> bool {
        self.file.known.is_some()
    }
}

/// The state of an image during placement.
enum Fate {
    /// Not decided: it depends on its parent file.
    Waits(String),
    /// Placed, on the parent file if there is one.
    Placed(Option<String>),
}

/// Places the unknown images among all.
pub fn place(all: Vec<Found>) -> Placement {
    let mut placement = Placement::default();
    let mut fates: HashMap<String, Fate> = HashMap::new();
    let mut order: Vec<String> = Vec::new();
    let refuse = |placement: &mut Placement, found: &Found, problem| {
        placement.unplaced.push(unplaced(found.file.file.clone(), problem));
    };
    let twins = twins(&all);
    for found in &all {
        let name = found.file.file.clone();
        let fate = match (found.is_known(), twins.get(&*name)) {
            (true, _) => Ok(Fate::Placed(None)),
            (false, Some(twin)) => Err(two_alike(twin)),
            (false, None) => parent_of(found, &all).map(|parent| match parent {
                None => Fate::Placed(None),
                Some(parent) => Fate::Waits(parent),
            }),
        };
        match fate {
            Ok(Fate::Waits(parent)) => drop(fates.insert(name, Fate::Waits(parent))),
            Ok(placed) => {
                order.push(name.clone());
                fates.insert(name, placed);
            }
            Err(problem) => refuse(&mut placement, found, problem),
        }
    }
    settle(&mut fates, &mut order);
    let parents: HashSet<String> = fates
        .values()
        .filter_map(|fate| match fate {
            Fate::Placed(Some(parent)) => Some(parent.clone()),
            _ => None,
        })
        .collect();
    let mut by_name: HashMap<String, Found> = all.into_iter().map(|found| (found.file.file.clone(), found)).collect();
    for name in order {
        let (Some(Fate::Placed(parent)), Some(found)) = (fates.remove(&name), by_name.remove(&name)) else { continue };
        if !found.is_known() {
            placement.placed.push(Placing { below_others: parents.contains(&name), found, parent });
        }
    }
    // The remaining ones depend on an unplaced image or on themselves.
    for (name, fate) in &fates {
        if let (Fate::Waits(parent), Some(found)) = (fate, by_name.get(name)) {
            let problem = without_end(name, parent, &fates);
            refuse(&mut placement, found, problem);
        }
    }
    placement.unplaced.sort_by(|one, other| one.file.cmp(&other.file));
    placement
}

/// Places images whose parents are placed, until no more can be.
fn settle(fates: &mut HashMap<String, Fate>, order: &mut Vec<String>) {
    let mut children: HashMap<String, Vec<String>> = HashMap::new();
    for (name, fate) in fates.iter() {
        if let Fate::Waits(parent) = fate {
            children.entry(parent.clone()).or_default().push(name.clone());
        }
    }
    let mut at = 0;
    while let Some(parent) = order.get(at).cloned() {
        at += 1;
        let mut ready = children.remove(&parent).unwrap_or_default();
        ready.sort();
        for child in ready {
            fates.insert(child.clone(), Fate::Placed(Some(parent.clone())));
            order.push(child);
        }
    }
}

/// Unknown images with the same identity as another, each with one such other.
fn twins(all: &[Found]) -> HashMap<&str, &str> {
    let mut by_identity: HashMap<Uuid, Vec<&Found>> = HashMap::new();
    for found in all {
        if let Some(identity) = found.identity {
            by_identity.entry(identity).or_default().push(found);
        }
    }
    let mut twins = HashMap::new();
    for alike in by_identity.values().filter(|alike| alike.len() > 1) {
        for found in alike.iter().filter(|found| !found.is_known()) {
            if let Some(other) = alike.iter().find(|other| other.file.file != found.file.file) {
                twins.insert(&*found.file.file, &*other.file.file);
            }
        }
    }
    twins
}

fn two_alike(twin: &str) -> Problem {
    Problem::new(
        Code::Exists,
        format!("it has the same identity as '{twin}', so children's parents would be ambiguous"),
    )
    .advise("remove one of them, or import it to give it a new identity")
}

/// The file of an image's parent, if it has one.
fn parent_of(found: &Found, all: &[Found]) -> Result<Option<String>, Problem> {
    let Some(recorded) = &found.parent else { return Ok(None) };
    let missing = || {
        let what = format!("its parent {} is not in this repository", recorded.shown);
        Problem::new(Code::NotFound, what).advise("copy the parent here and scan again, or import the image")
    };
    let of_format = |other: &&Found| recorded.format.is_none_or(|format| format == other.file.format);
    let by_identity = recorded
        .identity
        .and_then(|identity| all.iter().filter(of_format).find(|other| other.identity == Some(identity)));
    if let Some(parent) = by_identity {
        return Ok(Some(parent.file.file.clone()));
    }
    let by_name = all.iter().filter(of_format).find(|other| Some(&other.file.file) == recorded.file.as_ref());
    let parent = by_name.ok_or_else(missing)?;
    match (recorded.identity, parent.identity) {
        (Some(meant), Some(there)) if meant != there => {
            let name = &parent.file.file;
            let what = format!("its parent has identity {meant}, but the file '{name}' recorded for it has {there}");
            Err(Problem::new(Code::NotFound, what).advise("put the right file here and scan again"))
        }
        _ => Ok(Some(parent.file.file.clone())),
    }
}

/// The reason why an image could not be placed.
fn without_end(name: &str, parent: &str, fates: &HashMap<String, Fate>) -> Problem {
    let mut below = parent;
    let mut seen = HashSet::from([name]);
    while let Some(Fate::Waits(next)) = fates.get(below) {
        if !seen.insert(below) {
            let what = format!("its parent '{parent}' is part of a loop");
            return Problem::new(Code::Invalid, what)
                .advise("one of them records a wrong parent: see 'tapline image info'");
        }
        below = next;
    }
    let what = format!("its parent '{below}' is unplaced itself");
    Problem::new(Code::NotFound, what).advise("resolve that one first")
}

#[cfg(test)]
mod test;
