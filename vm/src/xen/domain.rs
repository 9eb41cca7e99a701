//! Finds a domain by name or id, and our own domain.
//!
//! It only knows xenstore's list of domains. A domain that is missing there cannot be given a disk.

use control::{Error, printable};
use xen::{DomId, Store};

use super::device::{children, text};

/// Domains named in a message.
const NAMED: usize = 12;

/// The number of the domain in which this program runs. The toolstack leaves it to each domain; without one, it is the
/// first.
pub fn own(store: &mut dyn Store) -> Result<DomId, Error> {
    let number = text(store, None, "domid")?;
    match number {
        None => Ok(DomId(0)),
        Some(number) => number.trim().parse().map(DomId).map_err(|error| {
            Error::cannot(format!("parse this domain's id from xenstore, which has '{number}'"), error)
        }),
    }
}

/// The domain of that number or name.
pub fn find(store: &mut dyn Store, word: &str) -> Result<DomId, Error> {
    if let Ok(number) = word.parse() {
        return seen(store, DomId(number)).map(|()| DomId(number));
    }
    let all = all(store)?;
    let mut named = all.iter().filter(|(_, name)| name == word);
    match (named.next(), named.next()) {
        (Some(&(domain, _)), None) => Ok(domain),
        (None, _) => Err(none(word, &all)),
        (Some(_), Some(_)) => Err(Error::cannot(format!("find the domain {word}"), "there is more than one")
            .advise(format!("give its id: {}", listed(&all)))),
    }
}

/// That the domain is there.
pub fn seen(store: &mut dyn Store, domain: DomId) -> Result<(), Error> {
    if text(store, None, &format!("/local/domain/{domain}"))?.is_some() {
        return Ok(());
    }
    let all = all(store)?;
    Err(none(&domain.to_string(), &all))
}

/// The name of the domain; `None` if it is gone.
pub fn name(store: &mut dyn Store, domain: DomId) -> Result<Option<String>, Error> {
    text(store, None, &format!("/local/domain/{domain}/name"))
}

fn all(store: &mut dyn Store) -> Result<Vec<(DomId, String)>, Error> {
    let mut all = Vec::new();
    for number in children(store, None, "/local/domain")? {
        if let Ok(number) = number.parse() {
            all.push((DomId(number), name(store, DomId(number))?.unwrap_or_default()));
        }
    }
    all.sort();
    Ok(all)
}

fn none(word: &str, all: &[(DomId, String)]) -> Error {
    Error::cannot(format!("find the domain {word}"), "there is no domain with that id or name")
        .advise(format!("xenstore has {}", listed(all)))
}

fn listed(all: &[(DomId, String)]) -> String {
    let one = |(number, name): &(DomId, String)| match name.as_str() {
        "" => number.to_string(),
        name => format!("{number} ({})", printable(name)),
    };
    let more = if all.len() > NAMED { format!(" and {} more", all.len() - NAMED) } else { String::new() };
    match all {
        [] => "no domains".to_owned(),
        all => all.iter().take(NAMED).map(one).collect::<Vec<String>>().join(", ") + &more,
    }
}

#[cfg(test)]
mod test {
    use xen::fake::{FakeStore, Host};

    use super::*;

    fn store_with(domains: &[(u16, &str)]) -> FakeStore {
        let mut store = Host::new().unwrap().store(DomId(0)).unwrap();
        for (number, name) in domains {
            store.write(None, &format!("/local/domain/{number}/name"), name.as_bytes()).unwrap();
        }
        store
    }

    #[test]
    fn a_domain_is_found_by_id_and_by_name() {
        let mut store = store_with(&[(0, "Domain-0"), (3, "db"), (12, "web")]);
        assert_eq!(find(&mut store, "12").unwrap(), DomId(12));
        assert_eq!(find(&mut store, "db").unwrap(), DomId(3));
        assert_eq!(own(&mut store).unwrap(), DomId(0));
    }

    #[test]
    fn a_missing_domain_is_refused_with_a_list() {
        let mut store = store_with(&[(0, "Domain-0"), (3, "db")]);
        for word in ["4", "dbx", "70000"] {
            let failure = find(&mut store, word).unwrap_err().with_advice();
            assert_eq!(
                failure,
                format!(
                    "cannot find the domain {word}: there is no domain with that id or name\n  xenstore has 0 (Domain-0), 3 (db)"
                )
            );
        }
    }

    #[test]
    fn an_ambiguous_domain_name_is_refused() {
        let mut store = store_with(&[(3, "db"), (4, "db")]);
        assert!(find(&mut store, "db").unwrap_err().advice.as_deref().unwrap().contains("3 (db), 4 (db)"));
    }
}
