//! Chooses the I/O engine of a disk: the requested one, else the one that suits the files and the memory, else the one
//! that the system permits. Automatic choices are logged.
//!
//! If the storage itself reads and writes the pages of a Xen guest (`--grants map`), Linux AIO is used. When a process
//! is killed, the kernel first waits for its AIO and then unmaps its memory. For io_uring it does not wait: it unmaps
//! the guest's pages while the storage still reads or writes them, which gntdev does not survive (seen with Linux 6.1
//! as a PV domain 0: a kernel oops in domain 0). Otherwise our own memory is used in between, which stays until the
//! last request on it has completed.

use control::ImageName;
use uring::{Cache, Engine, EngineError, EngineKind, ImageFile};

use crate::image::fileless;
use crate::process::failure::Failure;
use crate::process::log::say;

/// The chosen engine, and the message about it.
pub struct Choice {
    /// The engine.
    pub kind: EngineKind,
    /// A log line, if there is a reason to explain the choice.
    pub note: Option<String>,
}

/// Whose memory the storage reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// Ours, or memory that a peer shares with us as a file.
    Own,
    /// Pages of a Xen guest, if they are mapped.
    Granted,
}

/// The properties of a disk on which the choice depends.
#[derive(Clone, Copy, Debug)]
struct DiskTraits<'a> {
    /// The path of a file for which io_uring needs a thread per request.
    slow: Option<&'a str>,
    /// Whether a file is open through the page cache: Linux AIO then blocks, and the storage does not access the data's
    /// memory.
    cached: bool,
    data: Data,
}

/// Opens the engine of the disk `name` on `files`: the requested one, if any; else the one that suits it, or the other
/// one if the system refuses that. A choice that has a reason is logged.
pub fn open(
    name: &ImageName,
    requested: Option<EngineKind>,
    files: Vec<ImageFile>,
    depth: usize,
    data: Data,
) -> Result<Engine, Failure> {
    if let Some(kind) = fileless::engine(name, requested)? {
        return Engine::open(kind, files, depth).map_err(Failure::said);
    }
    let choice = choose(requested, &files, data);
    let again = files.clone();
    let refused = match Engine::open(choice.kind, files, depth) {
        Ok(engine) => {
            choice.note.iter().for_each(say);
            return Ok(engine);
        }
        Err(refused) => refused,
    };
    let Some(other) = refused.other() else { return Err(Failure::said(refused)) };
    let hindrance = hindrance(other, are_cached(&again), data);
    if requested.is_some() || hindrance.is_some() {
        return Err(failure_of(refused, hindrance.or(option(other))));
    }
    let remedy = refused.remedy().map_or_else(String::new, |remedy| format!("; {remedy}"));
    let report = |done| {
        say(format_args!("{} is {done} for {name}, although it suits it less: {refused}{remedy}", words(other)));
    };
    match Engine::open(other, again, depth) {
        Ok(engine) => {
            report("used");
            Ok(engine)
        }
        Err(also) => {
            report("tried");
            Err(failure_of(also, None))
        }
    }
}

/// Returns what users would have to change before this engine may be used instead; `None` if it may be used as is.
fn hindrance(other: EngineKind, cached: bool, data: Data) -> Option<&'static str> {
    match other {
        EngineKind::Aio if cached => Some("use --cache none"),
        EngineKind::Uring if data == Data::Granted && !cached => Some("use other --grants"),
        _ => None,
    }
}

/// Returns the command line option for this engine.
fn option(kind: EngineKind) -> Option<&'static str> {
    match kind {
        EngineKind::Uring => Some("use --io-engine uring"),
        EngineKind::Aio => Some("use --io-engine aio"),
        EngineKind::Null | EngineKind::Model(_) => None,
    }
}

/// Explains that an engine was refused.
fn failure_of(refused: EngineError, instead: Option<&str>) -> Failure {
    let advice: Vec<&str> = [refused.remedy(), instead].into_iter().flatten().collect();
    let failure = Failure::said(refused);
    if advice.is_empty() { failure } else { failure.advise(advice.join(", or ")) }
}

/// Returns the engine's name for people.
pub fn words(kind: EngineKind) -> &'static str {
    match kind {
        EngineKind::Uring => "io_uring",
        EngineKind::Aio => "Linux AIO",
        EngineKind::Null | EngineKind::Model(_) => "no I/O",
    }
}

/// Chooses an engine for `files`. A named engine is always used.
pub fn choose(named: Option<EngineKind>, files: &[ImageFile], data: Data) -> Choice {
    let mut all = files.iter().flat_map(ImageFile::all_files);
    let slow = all.find(|file| file.uring_needs_workers());
    let path = slow.map(|file| file.path().display().to_string());
    decide(named, DiskTraits { slow: path.as_deref(), cached: are_cached(files), data })
}

fn are_cached(files: &[ImageFile]) -> bool {
    files.iter().any(|file| file.options().cache == Cache::Writeback)
}

fn decide(named: Option<EngineKind>, DiskTraits { slow, cached, data }: DiskTraits<'_>) -> Choice {
    let unsafe_to_kill = data == Data::Granted && !cached;
    let (kind, note) = match (named, slow) {
        (Some(kind @ (EngineKind::Aio | EngineKind::Null | EngineKind::Model(_))), _) => (kind, None),
        (None, _) if unsafe_to_kill => {
            let note = "Linux AIO is used: if a process is killed, the kernel unmaps the guest's pages under an io_uring's \
                        requests (other --grants, or --io-engine uring, override this)";
            (EngineKind::Aio, Some(note.to_owned()))
        }
        (Some(EngineKind::Uring), _) if unsafe_to_kill => {
            let note =
                "io_uring is used on pages that are the guest's: if this process is killed, domain 0 may go down";
            (EngineKind::Uring, Some(note.to_owned()))
        }
        (_, None) => (EngineKind::Uring, None),
        (None, Some(path)) if !cached => {
            let note = format!(
                "Linux AIO is used: on the file system of {path}, io_uring would need a thread for every request \
                 (--io-engine uring overrides this)"
            );
            (EngineKind::Aio, Some(note))
        }
        (_, Some(path)) => {
            let note =
                format!("io_uring is used, although the file system of {path} makes it use a thread for every request");
            (EngineKind::Uring, Some(note))
        }
    };
    Choice { kind, note }
}

#[cfg(test)]
mod test {
    use super::*;

    fn traits(slow: Option<&str>, cached: bool) -> DiskTraits<'_> {
        DiskTraits { slow, cached, data: Data::Own }
    }

    #[test]
    fn granted_pages_use_aio_except_through_the_page_cache() {
        let direct = DiskTraits { slow: None, cached: false, data: Data::Granted };
        let choice = decide(None, direct);
        assert_eq!(choice.kind, EngineKind::Aio);
        assert!(choice.note.unwrap().contains("--grants"));
        let choice = decide(Some(EngineKind::Uring), direct);
        assert_eq!(choice.kind, EngineKind::Uring);
        assert!(choice.note.unwrap().contains("domain 0 may go down"));
        assert_eq!(decide(None, DiskTraits { cached: true, ..direct }).kind, EngineKind::Uring);
    }

    #[test]
    fn io_uring_is_the_default_and_is_not_reported() {
        let choice = decide(None, traits(None, false));
        assert_eq!((choice.kind, choice.note), (EngineKind::Uring, None));
    }

    #[test]
    fn where_io_uring_is_slow_aio_is_chosen_and_reported() {
        let choice = decide(None, traits(Some("/dev/shm/a"), false));
        assert_eq!(choice.kind, EngineKind::Aio);
        assert!(choice.note.unwrap().contains("/dev/shm/a"));
    }

    #[test]
    fn a_requested_engine_is_used_with_a_warning() {
        let choice = decide(Some(EngineKind::Uring), traits(Some("/dev/shm/a"), false));
        assert_eq!(choice.kind, EngineKind::Uring);
        assert!(choice.note.is_some());
        assert_eq!(decide(Some(EngineKind::Aio), traits(Some("/dev/shm/a"), true)).kind, EngineKind::Aio);
    }

    #[test]
    fn aio_is_never_chosen_for_files_in_the_page_cache() {
        assert_eq!(decide(None, traits(Some("/dev/shm/a"), true)).kind, EngineKind::Uring);
    }
}
