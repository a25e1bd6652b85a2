"""Huawei Ascend NPUs through torch_npu; `emulator` stands in for CANN where there is no NPU."""
