//! The dirty bitmaps among the contexts of an export: what has changed in a VDI since earlier snapshots of it.
//!
//! The context of a snapshot is `qemu:dirty-bitmap:` with its UUID. All that are known are listed here; a disk process
//! offers only those that a client has set ([`crate::reader`]). It knows no client, and looks into no map.

use api::{Code, Problem};
use nbd::wire;
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::vdi::begin;
use crate::vdi::maps::History;

/// In front of the UUID of a snapshot.
const BITMAP: &str = "qemu:dirty-bitmap:";

/// What separates the name of an export from the only snapshot whose bitmap is listed: some clients can use no more
/// than one bitmap, and take it from the list.
const SINCE: &str = "@since=";

/// The maximum number of dirty bitmaps that a disk process offers.
const BITMAPS_MAX: usize = 16;

/// The name of a VDI, and the only snapshot whose bitmap is to be listed, of the name of an export without a token.
pub fn split_since(name: &str) -> Result<(&str, Option<Uuid>), Problem> {
    let Some((name, since)) = name.rsplit_once(SINCE) else { return Ok((name, None)) };
    let since = since.parse::<Uuid>().map_err(|_| {
        let what = format!("'{}' behind the name of the export is not the UUID of a snapshot", api::visible(since));
        Problem::new(Code::NotFound, what).advise("name the export NAME@since=UUID: tapline vdi list")
    })?;
    Ok((name, Some(since)))
}

/// The snapshots whose bitmaps are set by the data of NBD_OPT_SET_META_CONTEXT behind the name of the export; at most
/// as many as a disk process offers.
pub fn set(queries: &[u8]) -> Vec<Uuid> {
    let mut found = Vec::new();
    for snapshot in strings(queries).unwrap_or_default().into_iter().filter_map(snapshot_of) {
        if !found.contains(&snapshot) && found.len() < BITMAPS_MAX {
            found.push(snapshot);
        }
    }
    found
}

/// The replies for bitmaps to NBD_OPT_LIST_META_CONTEXT with this data behind the name of the export: those since whose
/// snapshots all changes of the VDI are known, or the `only` one of them.
pub async fn list(daemon: &Daemon, vdi: Uuid, only: Option<Uuid>, queries: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let queries = strings(queries).unwrap_or_default();
    let selects_all = queries.is_empty() || queries.iter().any(|query| [b"qemu:", BITMAP.as_bytes()].contains(query));
    let named: Vec<Uuid> = queries.into_iter().filter_map(snapshot_of).collect();
    if !selects_all && named.is_empty() {
        return Vec::new();
    }
    let found = async {
        let history = History::of(daemon, vdi).await?;
        let mut earlier = only.map_or_else(|| history.earlier(), |only| history.earlier_of(&[only]));
        earlier.retain(|(from, _)| selects_all || named.contains(from));
        Ok(begin::proven(daemon, &history, earlier).await)
    };
    let found = found.await.unwrap_or_else(|problem: Problem| {
        tracing::warn!(%vdi, "its changes are not listed to a client of the NBD address: {problem}");
        Vec::new()
    });
    // The number counts only when the context is set.
    let reply = |(from, _)| (wire::REP_META_CONTEXT, [&[0; 4], format!("{BITMAP}{from}").as_bytes()].concat());
    found.into_iter().map(reply).collect()
}

/// Whether a reply of a disk process lists a bitmap.
pub fn is_bitmap((kind, data): &(u32, Vec<u8>)) -> bool {
    *kind == wire::REP_META_CONTEXT && data.get(4..).is_some_and(|name| name.starts_with(BITMAP.as_bytes()))
}

/// The snapshot whose bitmap has this name.
fn snapshot_of(name: &[u8]) -> Option<Uuid> {
    let text = std::str::from_utf8(name).ok()?.strip_prefix(BITMAP)?;
    // A UUID can be written in other ways, which are names that no bitmap has.
    text.parse::<Uuid>().ok().filter(|uuid| uuid.to_string() == text)
}

/// The strings behind their number; `None` if the data is malformed, which the disk process reports.
fn strings(data: &[u8]) -> Option<Vec<&[u8]>> {
    let (count, mut rest) = data.split_first_chunk()?;
    let mut found = Vec::new();
    for _ in 0..u32::from_be_bytes(*count) {
        let (string, behind) = split_string(rest)?;
        found.push(string);
        rest = behind;
    }
    rest.is_empty().then_some(found)
}

/// Splits the data of an option into a string, such as the name of an export, behind its length, and the rest.
pub fn split_string(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = data.split_first_chunk()?;
    rest.split_at_checked(usize::try_from(u32::from_be_bytes(*len)).ok()?)
}

#[cfg(test)]
mod test {
    use super::*;

    fn queries(names: &[&str]) -> Vec<u8> {
        let length = |number: usize| u32::try_from(number).unwrap().to_be_bytes().to_vec();
        let each = names.iter().flat_map(|name| [length(name.len()), name.as_bytes().to_vec()].concat());
        length(names.len()).into_iter().chain(each).collect()
    }

    #[test]
    fn snapshots_are_found_among_the_contexts_that_are_set() {
        let one = Uuid::from_u128(0xabcd);
        let name = format!("{BITMAP}{one}");
        assert_eq!(set(&queries(&["base:allocation", &name, &name])), [one]);
        for other in ["", BITMAP, "qemu:", &one.to_string(), &name.to_uppercase(), &format!("{BITMAP}{}", one.simple())]
        {
            assert!(set(&queries(&[other])).is_empty(), "{other}");
        }
        let many: Vec<String> = (0..20).map(|number| format!("{BITMAP}{}", Uuid::from_u128(number))).collect();
        assert_eq!(set(&queries(&many.iter().map(String::as_str).collect::<Vec<_>>())).len(), BITMAPS_MAX);
    }

    #[test]
    fn the_only_snapshot_is_behind_the_name() {
        let one = Uuid::from_u128(0xabcd);
        assert_eq!(split_since("web").unwrap(), ("web", None));
        assert_eq!(split_since(&format!("web@since={one}")).unwrap(), ("web", Some(one)));
        assert_eq!(split_since(&format!("a@since=b@since={one}")).unwrap(), ("a@since=b", Some(one)));
        assert!(split_since("web@since=monday").unwrap_err().detail.contains("'monday'"));
    }

    #[test]
    fn malformed_queries_set_nothing() {
        let whole = queries(&[&format!("{BITMAP}{}", Uuid::from_u128(1))]);
        assert_eq!(set(&whole).len(), 1);
        for len in 0..whole.len() {
            assert!(set(&whole[..len]).is_empty(), "{len}");
        }
        assert!(set(&[&whole[..], b"x"].concat()).is_empty());
        assert!(set(&[255; 64]).is_empty());
    }

    #[test]
    fn only_contexts_with_the_name_of_a_bitmap_are_bitmaps() {
        let reply = |kind, name: &str| (kind, [b"\0\0\0\x03", name.as_bytes()].concat());
        assert!(is_bitmap(&reply(wire::REP_META_CONTEXT, "qemu:dirty-bitmap:x")));
        assert!(!is_bitmap(&reply(wire::REP_META_CONTEXT, "qemu:allocation-depth")));
        assert!(!is_bitmap(&reply(wire::REP_ACK, "qemu:dirty-bitmap:x")));
        assert!(!is_bitmap(&(wire::REP_META_CONTEXT, vec![0; 2])));
    }
}
