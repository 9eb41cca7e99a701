//! Lists the tests for a file system, from the lists of a built checkout of xfstests.
//!
//! Parses `tests/DIRECTORY/group.list`: lines of a number and the groups of the test.

use std::fs;
use std::path::Path;

/// The tests of a group for a file system: generic ones first, then its own.
pub fn of_group(checkout: &Path, file_system: &str, group: &str) -> Result<Vec<String>, String> {
    let mut tests = Vec::new();
    for directory in ["generic", file_system] {
        let list = checkout.join("tests").join(directory).join("group.list");
        let text = fs::read_to_string(&list)
            .map_err(|error| format!("{}: {error}; build the checkout first: make", list.display()))?;
        tests.extend(in_group(&text, group).into_iter().map(|number| format!("{directory}/{number}")));
    }
    if tests.is_empty() {
        return Err(format!("no test for {file_system} is in the group '{group}'"));
    }
    Ok(tests)
}

fn in_group<'a>(list: &'a str, group: &str) -> Vec<&'a str> {
    let lines = list.lines().filter(|line| !line.starts_with('#'));
    let tests = lines.filter_map(|line| {
        let mut words = line.split_whitespace();
        let number = words.next()?;
        words.any(|word| word == group).then_some(number)
    });
    tests.collect()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_test_is_in_the_groups_behind_its_number() {
        let list = "# QA groups control file, generated.\n\n001 rw dir auto quick\n002 auto quickly\n010 quick\n";
        assert_eq!(in_group(list, "quick"), ["001", "010"]);
    }
}
