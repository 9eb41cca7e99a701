//! Makes an input of the target `qcow2_image`: `qcow2_input IMAGE INPUT [REQUEST...]`, where a request is five numbers
//! (operation, place, number of sectors, fill; a place takes two) as ten hexadecimal digits.

use std::error::Error;

use tapline_fuzz::qcow2_input::{Asked, Input};

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let (Some(image), Some(target)) = (words.next(), words.next()) else {
        return Err("the names of an image and of an input are needed".into());
    };
    let requests: Result<Vec<Asked>, _> = words.map(|word| request(&word)).collect();
    let input = Input::of(&std::fs::read(image)?, requests?);
    std::fs::write(target, input.encode())?;
    Ok(())
}

fn request(word: &str) -> Result<Asked, Box<dyn Error>> {
    let number = u64::from_str_radix(word, 16).map_err(|error| format!("{word}: {error}"))?;
    match number.to_be_bytes() {
        [0, 0, 0, rest @ ..] => Ok(rest),
        _ => Err(format!("{word}: more than ten digits").into()),
    }
}
