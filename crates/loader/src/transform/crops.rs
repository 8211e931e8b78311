//! The parts of tensors that crops at the beginning of a pipeline need. Crops depend on shapes and random numbers only, so the parts are
//! known before any values are read.

use penstock_codec::cut::Cut;
use penstock_tensor::slice::Slice;

use crate::order::random::Draws;
use crate::transform::motion::cut_by;
use crate::transform::operation::{Operation, motions};

/// What is known of a value before it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Known {
    /// It is null, or it has no size of its own, as boxes and keypoints.
    Sizeless,
    Shape(Vec<u64>),
    /// It may be null, or its size is not known.
    Unknown,
}

/// The part of a stored value that its transforms need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    pub slice: Slice,
    /// Whether the part is the result, without padding or other changes.
    pub is_result: bool,
}

/// Return whether an operation moves elements without their values.
fn only_moves(operation: &Operation) -> bool {
    matches!(
        operation,
        Operation::Pad { .. } | Operation::RandomHorizontalFlip { .. } | Operation::RandomVerticalFlip { .. }
    ) || crops(operation)
}

fn crops(operation: &Operation) -> bool {
    matches!(operation, Operation::CenterCrop { .. } | Operation::RandomCrop { .. } | Operation::TokenChunks { .. })
}

/// Return whether a result of a group is cropped before anything needs its values. `transforms` are those of the group.
pub fn begins_with_crop(transforms: &[(u64, Operation, Vec<usize>)], place: usize) -> bool {
    let mine = transforms.iter().filter(|(_, _, on)| on.contains(&place)).map(|(_, operation, _)| operation);
    mine.take_while(|operation| only_moves(operation)).any(crops)
}

/// Return the part that each value of a group's sample needs, or None for values of unknown shape. Errors, such as a crop that does not fit,
/// are left to the transforms, which find them again.
pub fn needs(transforms: &[(u64, Operation, Vec<usize>)], known: &[Known], epoch: u64, draw: u64) -> Vec<Option<Need>> {
    let whole_cut = |known: &Known| match known {
        Known::Shape(shape) => Some(Cut::whole(&shape.iter().map(|size| *size as usize).collect::<Vec<_>>())),
        _ => None,
    };
    let mut cuts: Vec<Option<Cut>> = known.iter().map(whole_cut).collect();
    // Whether a later transform needs the values, so that further crops change nothing.
    let mut settled: Vec<bool> = known.iter().map(|known| *known == Known::Unknown).collect();
    for (key, operation, on) in transforms {
        let lead =
            on.iter().find(|at| known[**at] != Known::Sizeless).filter(|at| !settled[**at] && only_moves(operation));
        let size = lead.and_then(|at| cuts[*at].as_ref()).map(|cut| cut.size().to_vec());
        let Some(Ok(motions)) = size.map(|size| motions(operation, &size, &mut Draws::new(*key, epoch, draw))) else {
            on.iter().for_each(|at| settled[*at] = true);
            continue;
        };
        for (motion, at) in motions.iter().flat_map(|motion| on.iter().map(move |at| (motion, *at))) {
            if let Some(cut) = cuts[at].as_mut().filter(|_| !settled[at]) {
                settled[at] = !cut_by(cut, motion);
            }
        }
    }
    cuts.iter().zip(settled).map(|(cut, settled)| cut.as_ref().map(|cut| need_of(cut, settled))).collect()
}

fn need_of(cut: &Cut, settled: bool) -> Need {
    let range = |dimension: usize| {
        let size = cut.shape[dimension] as i64;
        let begin = cut.origin[dimension].clamp(0, size);
        begin as u64..(cut.origin[dimension] + cut.size[dimension] as i64).clamp(begin, size) as u64
    };
    let slice: Slice = (0..cut.rank).map(range).collect();
    let is_same = |dimension: usize| {
        !cut.mirrored[dimension] && (slice[dimension].end - slice[dimension].start) as usize == cut.size[dimension]
    };
    let is_result = !settled && (0..cut.rank).all(is_same);
    Need { slice, is_result }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crop(size: &[usize], padding: Option<Vec<i64>>) -> Operation {
        Operation::RandomCrop { size: size.to_vec(), padding, pad_if_needed: true, fill: 0.0 }
    }

    #[test]
    fn a_crop_inside_needs_its_box_and_is_the_result() {
        let transforms = [(1, crop(&[4, 3], None), vec![0, 1])];
        let known = [Known::Sizeless, Known::Shape(vec![100, 50, 7])];
        for draw in 0..50 {
            let found = needs(&transforms, &known, 0, draw);
            let Some(need) = &found[1] else { panic!("the shape is known") };
            let sizes: Vec<u64> = need.slice.iter().map(|range| range.end - range.start).collect();
            assert_eq!((found[0].is_none(), need.is_result, sizes), (true, true, vec![4, 3, 7]));
        }
    }

    #[test]
    fn padding_and_mirrors_need_the_part_inside_and_are_not_the_result() {
        let flip = Operation::RandomVerticalFlip { p: 1.0 };
        let transforms = [(1, crop(&[12], Some(vec![3, 3])), vec![0]), (2, flip, vec![1])];
        let known = [Known::Shape(vec![10]), Known::Shape(vec![5, 5])];
        for draw in 0..50 {
            let found = needs(&transforms, &known, 3, draw);
            let (Some(padded), Some(mirrored)) = (&found[0], &found[1]) else { panic!("the shapes are known") };
            assert!(!padded.is_result && padded.slice[0].end <= 10 && padded.slice[0].end - padded.slice[0].start >= 7);
            assert_eq!((&mirrored.slice, mirrored.is_result), (&vec![0..5, 0..5], false));
        }
    }

    #[test]
    fn what_follows_an_unknown_size_is_needed_whole() {
        let transforms = [(1, crop(&[2, 2], None), vec![0, 1])];
        let found = needs(&transforms, &[Known::Unknown, Known::Shape(vec![9, 9])], 0, 0);
        assert_eq!(found, [None, Some(Need { slice: vec![0..9, 0..9], is_result: false })]);
    }

    #[test]
    fn values_that_a_transform_needs_are_not_cut_further() {
        let erase = Operation::RandomErasing {
            p: 1.0,
            scale: [0.1, 0.2],
            ratio: [1.0, 1.0],
            value: vec![0.0],
            converted: false,
        };
        let transforms = [
            (1, crop(&[6, 6], None), vec![0]),
            (2, erase, vec![0]),
            (3, Operation::CenterCrop { size: vec![2, 2] }, vec![0]),
        ];
        let found = needs(&transforms, &[Known::Shape(vec![9, 9, 3])], 0, 0);
        let Some(Some(need)) = found.first() else { panic!("the shape is known") };
        assert_eq!((need.slice[0].end - need.slice[0].start, need.is_result), (6, false));
        assert!(begins_with_crop(&transforms, 0) && !begins_with_crop(&transforms[1..], 0));
    }
}
