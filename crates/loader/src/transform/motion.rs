//! Motions, and their effect on each kind of value.

use std::borrow::Cow;

use penstock_codec::cut::Cut;
use penstock_codec::region::Region;
use penstock_codec::resize;
use penstock_codec::resize::{Filter, Geometry, Resized};
use penstock_error::{Error, Result};

use crate::transform::cell::{Cell, CutArray, Image, ImageData};
use crate::transform::warp::Warp;

/// A geometry change that is the same for all columns of a transform.
pub enum Motion {
    /// For each leading dimension, the start and size of the box.
    Crop {
        boxes: Vec<(i64, usize)>,
        fill: f64,
    },
    Resize(Resized),
    Mirror(usize),
    Warp(Warp),
}

/// Apply a motion to one column. `size` is the size of the leading column before the motion.
pub fn moved(cell: &mut Cell<'_>, motion: &Motion, size: &[usize]) -> Result<()> {
    if let Cell::Image(image) = cell
        && let Motion::Crop { boxes, .. } = motion
    {
        let (width, height) = image.size();
        let ([(top, h), (left, w)], true) = (&boxes[..], boxes.len() == 2) else { return Ok(()) };
        let inside =
            *top >= 0 && *left >= 0 && *top as usize + h <= height && *left as usize + w <= width && *h > 0 && *w > 0;
        if !inside {
            *cell = Cell::Array(image.array()?);
        }
    }
    if let (Cell::Image(image), Motion::Warp(_)) = (&*cell, motion) {
        *cell = Cell::Array(image.array()?);
    }
    match (cell, motion) {
        (Cell::Image(image), Motion::Crop { boxes, .. }) => crop_image(image, boxes),
        (Cell::Image(image), Motion::Resize(resized)) => resize_image(image, resized)?,
        (Cell::Image(image), Motion::Mirror(dimension)) => image.mirrored[1 - dimension] ^= true,
        (Cell::Array(array), Motion::Crop { .. }) => crop_array(array, motion)?,
        (Cell::Array(array), Motion::Resize(resized)) => resize_array(array, resized)?,
        (Cell::Array(array), Motion::Mirror(dimension)) => array.cut.mirror(*dimension),
        (Cell::Array(array), Motion::Warp(warp)) => *array = warp.array(array)?,
        (Cell::Boxes(rows), motion) => rows.iter_mut().for_each(|row| *row = moved_box(*row, motion, size)),
        (Cell::Points(numbers, [_, each]), motion) => {
            numbers.chunks_exact_mut(*each).for_each(|point| move_point(point, motion, size))
        }
        (Cell::Null, _) | (Cell::Image(_), Motion::Warp(_)) => {}
    }
    Ok(())
}

fn crop_image(image: &mut Image<'_>, boxes: &[(i64, usize)]) {
    let (width, height) = image.size();
    let (top, h, left, w) = (boxes[0].0 as usize, boxes[0].1, boxes[1].0 as usize, boxes[1].1);
    // Mirroring comes last, so a mirrored image is cut from the opposite side.
    let left = if image.mirrored[0] { width - left - w } else { left };
    let top = if image.mirrored[1] { height - top - h } else { top };
    let window = &mut image.geometry.window;
    *window = Region { left: window.left + left, top: window.top + top, width: w, height: h };
    if image.geometry.resized.is_none() {
        let crop = &mut image.geometry.crop;
        let window = image.geometry.window;
        *crop = Region { left: crop.left + window.left, top: crop.top + window.top, width: w, height: h };
        image.geometry.window = Region::whole(w, h);
    }
}

fn resize_image(image: &mut Image<'_>, resized: &Resized) -> Result<()> {
    if image.size() == (resized.width, resized.height) {
        return Ok(());
    }
    // Nearest filters must pick pixels of the mirrored image, so the image is mirrored first. Otherwise, a different corner would
    // be the origin, and ties at a centre would be resolved differently.
    if image.geometry.resized.is_some() || (image.mirrored.contains(&true) && resized.filter.is_nearest()) {
        let (width, height) = image.size();
        let pixels = ImageData::Rgb(image.decode()?, width, height);
        *image = Image { pixels, geometry: Geometry::whole(width, height), mirrored: [false; 2] };
    }
    image.geometry.resized = Some(*resized);
    image.geometry.window = Region::whole(resized.width, resized.height);
    Ok(())
}

fn crop_array(array: &mut CutArray<'_>, motion: &Motion) -> Result<()> {
    if !cut_by(&mut array.cut, motion) {
        let (size, data) = (array.cut.size().to_vec(), array.materialised()?);
        *array = CutArray::new(Cow::Owned(data), array.dtype, &size);
        cut_by(&mut array.cut, motion);
    }
    Ok(())
}

/// Apply a motion to the cut of an array. Returns false, and leaves the cut as it is, if the motion needs the values.
pub fn cut_by(cut: &mut Cut, motion: &Motion) -> bool {
    match motion {
        Motion::Crop { boxes, fill } => {
            let beyond = boxes
                .iter()
                .zip(cut.size())
                .any(|((begin, wanted), size)| *begin < 0 || *begin as usize + wanted > *size);
            if beyond && cut.is_narrowed() {
                return false; // Earlier padding keeps its fill value, and the new box must not bring back elements that were cut away.
            }
            cut.fill = if beyond { *fill } else { cut.fill };
            boxes.iter().enumerate().for_each(|(dimension, (begin, size))| cut.narrow(dimension, *begin, *size));
        }
        Motion::Mirror(dimension) => cut.mirror(*dimension),
        Motion::Resize(_) | Motion::Warp(_) => return false,
    }
    true
}

fn resize_array(array: &mut CutArray<'_>, resized: &Resized) -> Result<()> {
    let (from_height, from_width) = (array.cut.size[0], array.cut.size[1]);
    let (height, width) = (resized.height, resized.width);
    if (from_height, from_width) == (height, width) {
        return Ok(());
    }
    // Class numbers in a mask must not be interpolated.
    let resized = if array.cut.rank == 3 { *resized } else { Resized { filter: Filter::Nearest, ..*resized } };
    let geometry = Geometry {
        crop: Region::whole(from_width, from_height),
        resized: Some(resized),
        window: Region::whole(width, height),
    };
    let (channels, size) = (array.cut.size[2], array.dtype.size()); // A mask's third size is 1.
    let mut out = vec![0; height * width * channels * size];
    resize::resize_pixels(
        &array.materialised()?,
        (from_width, from_height),
        channels,
        8 * size as u8,
        &geometry,
        &mut out,
    )?;
    *array = CutArray::new(Cow::Owned(out), array.dtype, &[height, width, channels][..array.cut.rank]);
    Ok(())
}

fn moved_box([x1, y1, x2, y2]: [f32; 4], motion: &Motion, size: &[usize]) -> [f32; 4] {
    match motion {
        Motion::Crop { boxes, .. } => {
            let ((top, h), (left, w)) = (boxes[0], boxes[1]);
            let x = |x: f32| (x - left as f32).clamp(0.0, w as f32);
            let y = |y: f32| (y - top as f32).clamp(0.0, h as f32);
            [x(x1), y(y1), x(x2), y(y2)]
        }
        Motion::Resize(Resized { width, height, .. }) => {
            let (x, y) = (*width as f32 / size[1] as f32, *height as f32 / size[0] as f32);
            [x1 * x, y1 * y, x2 * x, y2 * y]
        }
        Motion::Mirror(1) => [size[1] as f32 - x2, y1, size[1] as f32 - x1, y2],
        Motion::Mirror(_) => [x1, size[0] as f32 - y2, x2, size[0] as f32 - y1],
        Motion::Warp(warp) => warp.moved_box([x1, y1, x2, y2]),
    }
}

fn move_point(point: &mut [f32], motion: &Motion, size: &[usize]) {
    match motion {
        Motion::Crop { boxes, .. } => {
            point[0] -= boxes[1].0 as f32;
            point[1] -= boxes[0].0 as f32;
        }
        Motion::Resize(Resized { width, height, .. }) => {
            point[0] *= *width as f32 / size[1] as f32;
            point[1] *= *height as f32 / size[0] as f32;
        }
        Motion::Mirror(1) => point[0] = size[1] as f32 - 1.0 - point[0],
        Motion::Mirror(_) => point[1] = size[0] as f32 - 1.0 - point[1],
        Motion::Warp(warp) => warp.move_point(point),
    }
}

/// Drop boxes that are too small, together with their rows in the other columns. If the boxes were `lost`, all rows are dropped.
pub fn sanitise(cells: &mut [Cell<'_>], on: &[usize], (min_size, min_area): (f32, f32), lost: bool) -> Result<()> {
    let mut keep: Vec<bool> =
        match on.iter().find_map(|at| if let Cell::Boxes(rows) = &cells[*at] { Some(rows) } else { None }) {
            Some(rows) => rows
                .iter()
                .map(|[x1, y1, x2, y2]| x2 - x1 >= min_size && y2 - y1 >= min_size && (x2 - x1) * (y2 - y1) >= min_area)
                .collect(),
            None => return Ok(()),
        };
    if lost && keep.is_empty() {
        let rows = on
            .iter()
            .find_map(|at| if let Cell::Array(array) = &cells[*at] { array.cut.size().first().copied() } else { None });
        keep = vec![false; rows.unwrap_or(0)];
    }
    let kept = |index: &usize| keep[*index];
    for at in on {
        let rows = match &cells[*at] {
            Cell::Boxes(rows) if !lost => rows.len(),
            Cell::Array(array) => array.cut.size().first().copied().unwrap_or(0),
            _ => keep.len(),
        };
        if rows != keep.len() {
            return Err(Error::new(
                "invalid-value",
                format!("found {} boxes, but {rows} rows in a column that follows them", keep.len()),
            ));
        }
        match &mut cells[*at] {
            Cell::Boxes(rows) => *rows = (0..rows.len()).filter(kept).map(|index| rows[index]).collect(),
            Cell::Array(array) => {
                let (data, mut size) = (array.materialised()?, array.cut.size().to_vec());
                let row_bytes = data.len().checked_div(keep.len()).unwrap_or(0);
                let data = (0..keep.len())
                    .filter(kept)
                    .flat_map(|index| data[index * row_bytes..][..row_bytes].to_vec())
                    .collect();
                size[0] = keep.iter().filter(|keep| **keep).count();
                *array = CutArray::new(Cow::Owned(data), array.dtype, &size);
            }
            Cell::Points(numbers, _) => {
                let each = numbers.len().checked_div(keep.len()).unwrap_or(0);
                *numbers =
                    (0..keep.len()).filter(kept).flat_map(|index| numbers[index * each..][..each].to_vec()).collect();
            }
            _ => {}
        }
    }
    Ok(())
}
